# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""`python -m recipe.agent_env.trajectory_page DUMPS -o page.html`: the command.

Owns its arguments and messages, and how the parts of a page are put together.
"""

import argparse
import html
import itertools
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from recipe.agent_env.trajectory_page.dumps import DumpedEpisode, DumpError, find_dump_files, read_dumps
from recipe.agent_env.trajectory_page.encoding import EncodedPage, encode

_EXAMPLES = """\
examples:
  python -m recipe.agent_env.trajectory_page outputs/run/dump -o page.html
  python -m recipe.agent_env.trajectory_page outputs/run/dump/10.jsonl outputs/run/dump/20.jsonl -o page.html
  python -m recipe.agent_env.trajectory_page eval.jsonl -o page.html --title "Sokoban, before training"

Dumps come from a training run with trainer.rollout_data_dir=DIR (validation: trainer.validation_data_dir=DIR), or from
python -m recipe.agent_env.evaluate --out FILE. The page is one file, needs no network and shows training data to
whoever opens it.
"""


def build_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m recipe.agent_env.trajectory_page",
        description="Make one HTML page of dumped episodes: filters, chats, and numbers per token as colour.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("dumps", nargs="+", metavar="DUMP", help="folder of .jsonl dumps, or such a file")
    parser.add_argument("-o", "--out", type=Path, default=Path("trajectories.html"), help="page to write (%(default)s)")
    parser.add_argument("--title", help="heading of the page; by default the folder of the first dump")
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="model folder; shows single tokens of dumps that hold ids without texts",
    )
    parser.add_argument("--max-episodes", type=int, metavar="N", help="take the first N episodes only")
    return parser


def render_page(page: EncodedPage, *, title: str) -> str:
    """The HTML file.

    Args:
        page: Packed episodes.
        title: Title of the browser's tab.
    """
    folder = Path(__file__).parent
    chunks = "\n".join(f'<script type="text/plain" class="chunk">{chunk}</script>' for chunk in page.chunks)
    parts = {
        "{{title}}": html.escape(title),
        "{{style}}": (folder / "page.css").read_text(encoding="utf-8"),
        "{{index}}": page.index,
        "{{chunks}}": chunks,
        "{{script}}": (folder / "page.js").read_text(encoding="utf-8"),
    }
    text = (folder / "page.html").read_text(encoding="utf-8")
    pieces = []
    for name, part in parts.items():
        before, _, text = text.partition(name)
        pieces += [before, part]
    return "".join([*pieces, text])


def write_page(
    episodes: Iterable[DumpedEpisode], out: Path, *, title: str, max_episodes: int | None = None
) -> EncodedPage:
    """Write the page of some episodes.

    Args:
        episodes: In the order of the list.
        out: File to write; its folder is made.
        title: Heading.
        max_episodes: Take the first ones only.

    Raises:
        DumpError: There is no episode, or a dump cannot be read.
    """
    page = encode(itertools.islice(episodes, max_episodes), title=title)
    if not page.num_episodes:
        raise DumpError("the dumps hold no episode")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(render_page(page, title=title), encoding="utf-8")
    return page


def main(arguments: list[str] | None = None) -> int:
    """Run the command.

    Returns:
        Exit status: 0, or 2 when the dumps cannot be read.
    """
    args = build_parser().parse_args(arguments)
    started = time.perf_counter()
    try:
        files = find_dump_files(args.dumps)
        tokenizer = _load_tokenizer(args.tokenizer) if args.tokenizer else None
        title = args.title or str(files[0].resolve().parent.name)
        page = write_page(read_dumps(files, tokenizer), args.out, title=title, max_episodes=args.max_episodes)
    except (DumpError, OSError) as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    size = args.out.stat().st_size / 1e6
    seconds = time.perf_counter() - started
    print(f"{args.out}: {page.num_episodes} episodes of {len(files)} files, {size:.1f} MB, in {seconds:.1f} s")
    return 0


def _load_tokenizer(path: str) -> object:
    """The model's tokenizer.

    Raises:
        DumpError: It cannot be loaded.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as exc:
        raise DumpError(f"--tokenizer {path}: {exc}") from exc


if __name__ == "__main__":
    sys.exit(main())
