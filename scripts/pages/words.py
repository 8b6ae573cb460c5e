"""Words, amounts, dates and lines, drawn from a seed on one side of the hold-out.

A word is held out when its SHA-1 falls in a fixed tenth (`is_held_out`): training draws words outside that tenth only,
evaluation inside it only, so no evaluated word was ever trained on.
"""

from __future__ import annotations

import hashlib

import numpy as np

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
DIGITS = "0123456789"
PUNCTUATION = ".,:;-/+*%#&()'\"$@!?=_<>[]|"
CHARACTERS = LETTERS + DIGITS + PUNCTUATION

_WORDS = (
    "milk bread butter cheese eggs apple banana orange lemon tomato potato onion garlic carrot pepper rice pasta flour "
    "sugar salt coffee tea juice water beer wine soda cake cookie biscuit chocolate yogurt cream ham bacon chicken beef "
    "fish tuna salmon soup sauce honey jam cereal oats beans peas corn salad olive oil vinegar soap shampoo paper towel "
    "battery candle pen pencil notebook card bag box bottle can pack large small medium fresh organic whole half slice "
    "green red white black blue brown dark light sweet hot cold frozen dried daily family value extra store market shop "
    "street road avenue lane city open thank you visit again please keep receipt order table guest server cashier total "
    "subtotal cash change balance discount tax member points saved items price each phone date time invoice customer"
).split()
_ONSETS = "b c d f g h j k l m n p r s t v w y z br ch cl cr dr fl gr pl pr sh sl st th tr qu x".split()
_VOWELS = "a e i o u ai ea ee io oa oo ou y".split()
_CODAS = ["", "", "", "n", "r", "l", "s", "m", "d", "ng", "st", "nt", "lk", "sp", "b", "f", "z", "w"]


def is_held_out(word: str) -> bool:
    """Say whether a word belongs to the tenth that is never trained on; letter case does not matter."""
    return hashlib.sha1(word.lower().encode()).digest()[0] % 10 == 0


class Words:
    """Draws words of one side of the hold-out: shop words, invented words, numbers and codes."""

    def __init__(self, random: np.random.Generator, held_out: bool) -> None:
        self.random = random
        self.held_out = held_out
        self.known = [word for word in _WORDS if is_held_out(word) == held_out]

    def pick(self, choices: list[str] | str) -> str:
        """Draw one of several strings, or one character of a string."""
        return choices[int(self.random.integers(len(choices)))]

    def digits(self, count: int) -> str:
        """Draw a string of digits."""
        return "".join(self.pick(DIGITS) for _ in range(count))

    def invented(self) -> str:
        """Draw an invented word of one to three syllables that falls on the right side of the hold-out."""
        while True:
            count = int(self.random.choice([1, 2, 2, 2, 3, 3]))
            word = "".join(self.pick(_ONSETS) + self.pick(_VOWELS) + self.pick(_CODAS) for _ in range(count))
            if len(word) > 2 and is_held_out(word) == self.held_out:
                return word

    def word(self) -> str:
        """Draw a word in one of three letter cases."""
        word = self.pick(self.known) if self.random.random() < 0.35 else self.invented()
        case = self.random.random()
        return word if case < 0.4 else word.capitalize() if case < 0.75 else word.upper()

    def price(self) -> str:
        """Draw an amount, sometimes with a sign."""
        amount = f"{int(self.random.integers(0, self.pick_int(10, 100, 1000)))}.{self.digits(2)}"
        sign = self.pick(["", "", "", "", "$", "-"])
        return sign + amount

    def pick_int(self, *choices: int) -> int:
        """Draw one of several numbers."""
        return choices[int(self.random.integers(len(choices)))]

    def date(self) -> str:
        """Draw a date in one of four notations."""
        day, month = f"{self.random.integers(1, 32):02d}", f"{self.random.integers(1, 13):02d}"
        year = str(int(self.random.integers(1990, 2040)))
        notations = [
            f"{year}-{month}-{day}",
            f"{day}/{month}/{year}",
            f"{day}.{month}.{year[2:]}",
            f"{month}/{day}/{year[2:]}",
        ]
        return self.pick(notations)

    def time(self) -> str:
        """Draw a time of day, with seconds now and then."""
        clock = f"{self.random.integers(0, 24):02d}:{self.random.integers(0, 60):02d}"
        return clock + (f":{self.random.integers(0, 60):02d}" if self.random.random() < 0.3 else "")

    def name(self, most: int = 3) -> str:
        """Draw one to `most` words."""
        return " ".join(self.word() for _ in range(int(self.random.integers(1, most + 1))))

    def columns(self) -> tuple[str, str]:
        """Draw an entry and its amount: what a receipt prints left and right."""
        entry = self.pick(["item", "item", "item", "count", "count", "label", "percent", "weight"])
        if entry == "count":
            return f"{self.random.integers(1, 20)} x {self.name(2)}", self.price()
        if entry == "label":
            label = self.word() + self.pick(["", ":", ""])
            return label, self.pick([self.price(), self.digits(int(self.random.integers(1, 5)))])
        if entry == "percent":
            return f"{self.word()} {self.random.integers(1, 100)}%", self.price()
        if entry == "weight":
            return (
                f"{self.name(1)} {self.random.integers(1, 1000)}{self.pick(['g', 'ml', 'kg', 'L', 'oz'])}",
                self.price(),
            )
        return self.name(3), self.price() + self.pick(["", "", "", " A", " B", "*"])

    def single(self) -> str:
        """Draw a receipt line without columns: a heading, date, phone number, address, code or note."""
        kind = int(self.random.integers(9))
        if kind == 0:
            return f"{self.date()} {self.time()}"
        if kind == 1:
            return self.pick(["Tel: ", "Tel. ", "Phone: ", "", "+"]) + " ".join(
                self.digits(int(self.random.integers(2, 5))) for _ in range(3)
            )
        if kind == 2:
            return f"{self.random.integers(1, 999)} {self.name(2)}"
        if kind == 3:
            return (
                f"{self.word()} {self.pick(['#', 'No. ', 'No: ', '# '])}{self.digits(int(self.random.integers(2, 8)))}"
            )
        if kind == 4:
            return f"{self.word()}: {self.pick([self.date(), self.time(), self.word(), self.digits(4)])}"
        if kind == 5:
            return f"www.{self.word().lower()}.{self.pick(['com', 'org', 'net', 'shop'])}"
        if kind == 6:
            return f"{self.name(3)}{self.pick(['!', '.', '?', ','])}"
        if kind == 7:
            first, second, third = (self.pick(LETTERS[26:]) for _ in range(3))
            return f"{first}{self.digits(2)}-{self.digits(3)}/{second}{third}"
        return self.name(4)

    def line(self) -> str:
        """Draw the text of a line on its own."""
        return " ".join(self.columns()) if self.random.random() < 0.5 else self.single()

    def scramble(self, most: int = 16) -> str:
        """Draw a string of random characters with a rare space."""
        count = int(self.random.integers(1, most + 1))
        text = "".join(" " if self.random.random() < 0.07 else self.pick(CHARACTERS) for _ in range(count))
        return " ".join(text.split()) or self.pick(CHARACTERS)
