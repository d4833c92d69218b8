"""Load on a live server: requests sent at their own times, and what became of each."""

from headgate.load.address import Address, Body, parse_address
from headgate.load.closed_loop import run_closed_loop
from headgate.load.open_loop import run_open_loop
from headgate.load.options import LoadOptions
from headgate.load.payload import InputSpec, fetch_inputs, make_body, read_body
from headgate.load.result import LoadResult
from headgate.load.rows import TROUBLE_NAMES, Trouble
from headgate.load.summary import LoadSummary, summarise_load
from headgate.load.tally import Standing

__all__ = [
    "TROUBLE_NAMES",
    "Address",
    "Body",
    "InputSpec",
    "LoadOptions",
    "LoadResult",
    "LoadSummary",
    "Standing",
    "Trouble",
    "fetch_inputs",
    "make_body",
    "parse_address",
    "read_body",
    "run_closed_loop",
    "run_open_loop",
    "summarise_load",
]
