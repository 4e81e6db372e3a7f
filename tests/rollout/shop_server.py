"""A web application whose pages have the shape of the public WebShop's, over a shop in this process."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

HEAD = '<!DOCTYPE html>\n<html>\n<head><link rel="icon" href="data:,"><title>WebShop</title></head>\n<body>'


class Application:
    """Pages by address; an address is made when a page links to it."""

    def __init__(self, shop: Any) -> None:
        self.shop = shop
        self.sessions: dict[str, Any] = {}
        self.pages: dict[str, Any] = {}
        self.numbers = itertools.count()

    def address(self, visit: Any) -> str:
        path = f"/page/{next(self.numbers)}"
        self.pages[path] = visit
        return path

    def get(self, path: str) -> str:
        if path in self.pages:
            return self.html(path, self.pages[path])
        assert "fixed" in path
        visit = self.sessions.setdefault(path, self.shop.visit(int(path.split("_")[-1])))
        return self.html(path, visit)

    def search(self, path: str, words: str) -> str:
        return self.address(self.sessions.get(path, self.pages.get(path)).act("search", words))

    def form(self, visit: Any, label: str) -> str:
        target = self.address(visit.act("click", label.lower()))
        return f'<form method="post" action="{target}"><button class="btn btn-primary">{escape(label)}</button></form>'

    def html(self, path: str, visit: Any) -> str:
        if visit.score is not None:
            return (
                f"{HEAD}<h1>Thank you for shopping with us!</h1><h3>Your code: </h3><pre>None</pre>\n"
                f'<h3 id="reward">Your score (min 0.0, max 1.0)<pre>{visit.score}</pre></h3></body></html>'
            )
        texts, page = visit.page.observation.split(" [SEP] "), visit.page
        if page.has_search_bar:
            return (
                f"{HEAD}<h2>WebShop</h2><div><h4>Instruction: <br>{escape(texts[2])}</h4></div>"
                f'<form method="post" action="{path}"><input id="search_input" name="search_query">'
                '<button class="btn btn-success"><i></i>Search</button></form></body></html>'
            )
        return f"{HEAD}{''.join(self.element(visit, text) for text in texts)}<script>let x = 1;</script></body></html>"

    def element(self, visit: Any, text: str) -> str:
        options = {} if visit.product is None else visit.product.options
        if any(text in values for values in options.values()):
            url = self.address(visit.act("click", text))
            return (
                f'<input type="radio" name="x" value="{escape(text)}" data-url="{url}"><label>{escape(text)}</label>\n'
            )
        if text.lower() not in visit.page.clickables:
            return f"<h4>{escape(text)}</h4>\n"
        if text in visit.shop.catalogue.products:
            return f'<a class="product-link" href="{self.address(visit.act("click", text.lower()))}">{text}</a>\n'
        return self.form(visit, text)


@contextlib.contextmanager
def serving(shop: Any, hangs: bool = False) -> Iterator[str]:
    """The address of a running server; with ``hangs`` it takes requests and never answers."""
    application, stopped = Application(shop), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            return

        def do_GET(self) -> None:
            if hangs:
                stopped.wait()
                return
            body = application.get(self.path).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            form = parse_qs(self.rfile.read(int(self.headers.get("Content-Length", 0))).decode())
            if "search_query" not in form:
                return self.do_GET()
            self.send_response(302)
            self.send_header("Location", application.search(self.path, form["search_query"][0]))
            self.end_headers()
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        stopped.set()
        server.shutdown()
        server.server_close()
        thread.join()
