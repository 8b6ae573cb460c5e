"""The page at `/`: one file without a build step, which talks to the same routes as every other client.

It is the same for everybody and holds no data, so it needs no key; what it asks the server for does. Its policy lets it load
nothing from anywhere and run no script but its own.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route


def routes() -> list[Route]:
    """The route of the page."""
    return [Route("/", page, methods=["GET"])]


def page(request: Request) -> Response:
    """GET /: a page to try the served models with."""
    text = files("kaminari_http").joinpath("page.html").read_text(encoding="utf-8")
    headers = {
        "Content-Security-Policy": f"default-src 'none'; style-src {_hash(text, 'style')}; script-src {_hash(text, 'script')}; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }
    return HTMLResponse(text, headers=headers)


def _hash(text: str, element: str) -> str:
    """The source expression of Content Security Policy that stands for the page's one such element."""
    [content] = re.findall(rf"<{element}>(.*?)</{element}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
