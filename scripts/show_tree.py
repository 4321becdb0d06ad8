"""One round of speculation, drawn: the draft tree, the probabilities of its tokens, and what was accepted.

    .venv/bin/python scripts/show_tree.py --model smollm2 --chat --prompt "Count to twenty, twice." --after 60 \\
        --speculative-algorithm NGRAM --speculative-num-steps 4 --speculative-eagle-topk 2 \\
        --speculative-num-draft-tokens 8

Each line is a node: its token, how sure the draft was of it, the target's probability of it, and whether it was
accepted. Where the target went on otherwise, its token follows. --rounds shows several, --png draws a picture.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.markup import escape
from rich.tree import Tree

import jaxspec
from fitting import fit
from jaxspec import LLM, SamplingParams, cli
from report import make_console

ACCEPTED, REJECTED = "green", "dim"


class Node(NamedTuple):
    """A node of a drawn tree."""

    text: str
    parent: int
    draft: float | None  # probability by the draft's own account, given its parent
    target: float  # by the target's law, given its parent
    is_accepted: bool
    instead: str | None  # what the target drew here, where no child has it


class Round(NamedTuple):
    title: str
    nodes: dict[int, Node]  # by index; nodes without a draft are left out


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    spec, params = cli.spec_config(args), cli.sampling_params(args)
    if spec is None:
        raise ValueError("there is no tree without speculation; give --speculative-algorithm.")
    engine = fit(dataclasses.replace(cli.engine_config(args), disable_overlap_schedule=True), rows=1)
    console = make_console()
    with jaxspec.LLM(args.model, spec=spec, engine=engine) as llm:
        prompt = [{"role": "user", "content": args.prompt}] if args.chat else args.prompt
        shown = 0
        for drawn in rounds(llm, prompt, params, after=args.after, count=args.rounds):
            shown += 1
            console.print(as_text(drawn), "")
            if args.png is not None:
                path = args.png if args.rounds == 1 else args.png.with_stem(f"{args.png.stem}-{shown}")
                save_png(drawn, path)
                console.print(f"wrote {escape(str(path))}", "")
    if not shown:
        raise ValueError(f"the text ended before --after {args.after} tokens; give less, or --ignore-eos.")
    return 0


def rounds(llm: LLM, prompt: Any, params: SamplingParams, *, after: int, count: int) -> Iterator[Round]:
    """Rounds of the prompt's answer, from the first one with `after` tokens before it."""
    tokenizer, num_tokens = llm.tokenizer, 0
    say = str if tokenizer is None else lambda token: tokenizer.decode([token], skip_special_tokens=False)
    stream = llm.stream(prompt, params)
    for chunk in stream:
        num_tokens += len(chunk.token_ids)
        views = llm.engine.preview() if num_tokens >= after and chunk.finish_reason is None else []
        for _, view in views:
            yield read_round(view, say, num_tokens)
            count -= 1
        if not count:
            break
    stream.close()


def read_round(view: Any, say: Callable[[int], str], num_tokens: int) -> Round:
    """The nodes of a `RoundView`."""
    tree, emitted = view.tree, int(view.count)
    accepted = {int(node) for node in view.path[1:emitted]}
    last = int(view.path[emitted - 1])
    nodes: dict[int, Node] = {}
    for index, (token, parent) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist())):
        if token < 0 or (index and parent not in nodes):
            continue
        draft = None
        if tree.scores is not None and index:
            draft = float(np.exp(tree.scores[index] - tree.scores[parent]))
        drawn = int(view.drawn[index])
        is_end = index == last
        nodes[index] = Node(
            repr(say(token)),
            parent,
            draft,
            float(np.exp(view.logprobs[index])),
            index in accepted,
            repr(say(drawn)) if is_end else None,
        )
    title = f"after {num_tokens} tokens: {len(accepted)} of {len(nodes) - 1} drafts accepted, {emitted} tokens emitted"
    return Round(title, nodes)


def as_text(drawn: Round) -> Tree:
    """The tree for a terminal."""
    root = Tree(drawn.title)
    branches: dict[int, Tree] = {}
    for index, node in drawn.nodes.items():
        words = [f"[{ACCEPTED if node.is_accepted or not index else REJECTED}]{escape(node.text)}[/]"]
        if index:
            words += [] if node.draft is None else [f"draft {node.draft:.2f}"]
            words += [f"target {node.target:.2f}", *(["accepted"] if node.is_accepted else [])]
        if node.instead is not None:
            words.append(f"-> target goes on with {escape(node.instead)}")
        branches[index] = (branches[node.parent] if index else root).add("  ".join(words))
    return root


def save_png(drawn: Round, path: Path) -> None:
    """The tree as a picture: one row a depth, edges as wide as the target's probability.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--png needs matplotlib; install it with pip install matplotlib.") from None
    places = _places(drawn.nodes)
    width = max(x for x, _ in places.values()) + 1
    depth = max(y for _, y in places.values()) + 1
    figure = Figure(figsize=(max(4.0, 1.4 * width), max(2.0, 1.1 * depth)))
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.set_title(drawn.title, fontsize=9)
    for index, node in drawn.nodes.items():
        x, y = places[index]
        color = "tab:green" if node.is_accepted or not index else "tab:gray"
        if index:
            above = places[node.parent]
            axes.plot([above[0], x], [-above[1], -y], color=color, linewidth=0.5 + 4 * node.target, zorder=1)
        said = node.text if not index else f"{node.text}\n{node.target:.2f}"
        box = {"boxstyle": "round", "facecolor": "white", "edgecolor": color}
        axes.text(x, -y, said, ha="center", va="center", fontsize=8, bbox=box, zorder=2, parse_math=False)
    figure.savefig(path, dpi=150, bbox_inches="tight")


def _places(nodes: dict[int, Node]) -> dict[int, tuple[float, int]]:
    """Column and depth of each node: leaves side by side, others above the middle of their children."""
    children: dict[int, list[int]] = {index: [] for index in nodes}
    for index, node in nodes.items():
        if index:
            children[node.parent].append(index)
    places: dict[int, tuple[float, int]] = {}

    def place(index: int, depth: int, left: float) -> float:
        """Places what is below a node from column `left` on, and returns the next free one."""
        start = left
        for child in children[index]:
            left = place(child, depth + 1, left)
        end = max(left, start + 1)
        places[index] = ((start + end - 1) / 2, depth)
        return end

    place(0, 0, 0.0)
    return places


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = cli.build_parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    cli.add_model_flags(parser, default="smollm2")
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument("--chat", action="store_true", help="send the prompt as a user's message")
    parser.add_argument("--after", type=cli.count, default=1, metavar="TOKENS", help="tokens before the round")
    parser.add_argument("--rounds", type=cli.count, default=1, metavar="N", help="rounds to show (default: 1)")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw a picture too")
    cli.add_spec_flags(parser)
    cli.add_engine_flags(parser, {"disable_overlap_schedule": "the rounds are looked at one by one, which is v1"})
    cli.add_sampling_flags(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(cli.run(main))
