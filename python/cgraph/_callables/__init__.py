"""Behind ``make_graphed_callables``: captured passes, and the autograd node of calls."""
