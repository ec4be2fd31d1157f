"""The report as one self-contained HTML page: no network, charts drawn as SVG by Vega-Lite when the page is made."""

from specmeter.reporters.html.page import render_page, save_page, write_page

__all__ = ["render_page", "save_page", "write_page"]
