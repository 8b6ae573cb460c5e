"""Seeded generator of printed pages with their truths: words, drawing, kinds of pages, damage, and sets of them in a folder."""
