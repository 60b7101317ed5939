"""`milepost view`: a run or a checkpoint as one page for the browser, made from manifests and tables only."""

from milepost.view.collect import Budget, ViewOptions, collect
from milepost.view.page import make_page, write_page

__all__ = ["Budget", "ViewOptions", "collect", "make_page", "write_page"]
