"""Debug replays of a key of a graphed function."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cgraph._debug.periodic_check import PeriodicCheck
from cgraph._debug.replays import debugged
from cgraph._debug.training import debugged_call
from cgraph._graphed.call import Call
from cgraph._graphed.key import Key
from cgraph._graphed.recorded import Recorded
from cgraph._graphed.train import Trained
from cgraph._graphed.writeback import Fed
from cgraph._python.assignments import returning_assigned
from cgraph._python.names import names_in

if TYPE_CHECKING:
    from cgraph._graphed.miss import Answers

__all__ = ["debug"]


def debug(answers: Answers, key: Key, call: Call, recorded: Recorded | Trained) -> None:
    """Let a key be replayed for debugging, and capture it in steps of one operator.

    Args:
        answers: The answers of the function.
        key: The key.
        call: The call that was captured.
        recorded: Its capture, which is dropped if this fails.
    """

    def may_poison() -> bool:
        # A backward pass reads tensors that its forward pass left in memory that counts as free.
        return not any(isinstance(one.recorded, Trained) for one in answers.keys)

    options = answers.options
    words, count = options.debug or ("compare",), options.check_every
    plan = answers.captures.plan(key, call, needs_grad=isinstance(recorded, Trained))
    try:
        if isinstance(recorded, Trained):
            of_passes = words, plan, answers.name, key.text, call, recorded
            passes = debugged_call(*of_passes, answers.taken)
            recorded.debugged = passes
            if not options.debug:
                recorded.debugged = PeriodicCheck(count, passes, recorded.replay, passes.reset)
            return
        if recorded.assign.targets or call.placed:
            given = recorded.assign.targets, call.objects, call.places
            of_key = plan.before.guards, names_in(plan.before.codes), *given
            plan = replace(plan, function=returning_assigned(plan.function, *of_key))
            call = call.giving_placed()
        of_graph = words, plan, answers.name, key.text, call, recorded
        graph = debugged(*of_graph, may_poison)
    except BaseException:
        recorded.reset()
        raise
    recorded.debugged = graph
    if not options.debug:
        recorded.debugged = PeriodicCheck(count, graph, Fed(recorded), graph.reset)
