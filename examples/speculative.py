"""Speculative decoding in one launch: a small model guesses, and a large one checks now and then.

Each step guesses one token. After `AHEAD` guesses the large model checks all of them at once and
keeps those that it would have chosen itself, so that the tokens are the ones it would have made
alone. The device decides when it runs, and how many tokens it keeps: the host only looks on.
"""

import itertools
import os

import torch

import cgraph

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    os.environ.setdefault("CGRAPH_DRIVER", "sim")  # CPU tensors stand for a GPU's

torch.manual_seed(0)
WORDS, WIDTH, NEW, AHEAD = 512, 64, 100, 4


class Model(torch.nn.Module):
    """A model that chooses the next token by the one before."""

    def __init__(self, layers):
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, WIDTH)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.head = torch.nn.Linear(WIDTH, WORDS)

    def forward(self, token):
        hidden = self.embed(token)
        for layer in self.layers:
            hidden = hidden + 0.5 * torch.tanh(layer(hidden))
        return self.head(hidden).argmax(-1)


large = Model(8).to(device).eval()
# The small model begins as the large one does, and lacks its last layers.
small = Model(5).to(device).eval()
small.load_state_dict(large.state_dict(), strict=False)


def check(guesses, counts, tokens):
    """Keep the guesses that the large model agrees with, and its own choice behind them."""
    length, guessed = counts[:1], counts[1:]
    last = tokens.gather(0, length - 1)
    chosen = large(torch.cat([last, guesses[:-1]]))
    agrees = (chosen == guesses).long().cumprod(0).sum(0, keepdim=True)
    # What lies behind the last kept token is written again.
    tokens.scatter_(0, length + torch.arange(AHEAD, device=device), chosen)
    length.add_((agrees + 1).clamp(max=AHEAD))
    guessed.zero_()


def step(guesses, counts, tokens, done):
    """Guess one more token, and let the guesses be checked if there are enough."""
    length, guessed = counts[:1], counts[1:]
    before = torch.where(
        guessed == 0,
        tokens.gather(0, length - 1),
        guesses.gather(0, (guessed - 1).clamp(min=0)),
    )
    guesses.scatter_(0, guessed, small(before))
    guessed.add_(1)
    cgraph.when(guessed == AHEAD, check, guesses, counts, tokens)
    done.copy_(length >= NEW)


def beginning(first):
    """Return the state before the first step: one token is there, and nothing is guessed."""
    tokens = torch.zeros(NEW + AHEAD, dtype=torch.long, device=device)
    tokens[0] = first
    counts = torch.tensor([1, 0], device=device)
    done = torch.zeros(1, dtype=torch.bool, device=device)
    return torch.zeros(AHEAD, dtype=torch.long, device=device), counts, tokens, done


looped = cgraph.loop(max_steps=AHEAD * NEW, until="done", emit="counts")(step)
state = beginning(0)
with torch.no_grad():
    for first in (3, 14, 15):
        for one, begin in zip(state, beginning(first), strict=True):
            one.copy_(begin)
        run = looped(*state)
        lengths = [int(counts[0]) for counts in run]
        checks = sum(one < other for one, other in itertools.pairwise([1, *lengths]))
        expected = [torch.tensor([first], device=device)]
        while len(expected) < NEW:
            expected.append(large(expected[-1]))
        assert torch.equal(run.result()[2][:NEW], torch.cat(expected))
        print(f"{NEW} tokens by {checks} runs of the large model and {run.steps} of the small one")
print(looped.report())
