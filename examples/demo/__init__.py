"""The demo: a small transformer learns a book and writes, both in captured graphs.

Each captured step is compared with the same step done eagerly, on the same numbers and seeds.
The book is *Alice's Adventures in Wonderland* (Lewis Carroll, 1865, public domain); see README.md.
"""

from examples.demo.check import CheckError
from examples.demo.program import ON_GPU, ON_SIMULATOR, Plan, run

__all__ = ["ON_GPU", "ON_SIMULATOR", "CheckError", "Plan", "run"]
