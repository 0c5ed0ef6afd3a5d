"""`python -m compute_node.training --out DIR --minutes N [--text DIR]`: make the embedded model again.

With `--held-out FILE` instead of a budget it writes the text that the embedded model was not trained on.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

from tierd.errors import TierdError, UsageError
from tierd.extras import install_hint


def run(arguments: argparse.Namespace) -> None:
    """Get the text unless it was given, and train or write its held-out part."""
    if arguments.held_out is not None:
        from compute_node.training.corpus import held_out_text  # noqa: PLC0415  (with its imports, only where wanted)
        from compute_node.training.text import documents  # noqa: PLC0415

        texts = documents(_text(arguments))
        tokenizer = Path(__file__).resolve().parents[1] / "embedded" / "tokenizer.json"
        arguments.held_out.write_text(held_out_text(texts, tokenizer), encoding="utf-8")
        return
    if importlib.util.find_spec("torch") is None:
        raise UsageError("training needs torch", hint=install_hint("train"))
    import torch  # noqa: PLC0415  (checked above, so that its absence is told in one line)

    from compute_node.training.train import Budget, train  # noqa: PLC0415

    budget = Budget(arguments.minutes or 0.0, arguments.steps or 0)
    torch.set_num_threads(arguments.threads)
    out: Path = arguments.out
    train(_text(arguments), out, budget, tell=lambda line: print(line, flush=True))
    print(f"the model is in {out / 'checkpoint'}; run again with a larger budget to go on")


def _text(arguments: argparse.Namespace) -> Path:
    """The folder of the text; made from Debian packages where none was given and none is there yet."""
    from compute_node.training.text import build_text, download_packages  # noqa: PLC0415  (see above)

    out: Path = arguments.out
    text: Path = arguments.text or out / "text"
    if arguments.text is None and not text.exists():
        packages = out / "packages"
        packages.mkdir(parents=True, exist_ok=True)
        print(f"fetching the text's Debian packages into {packages}")
        download_packages(packages)
        unfinished = out / "text.part"
        build_text(packages, unfinished)
        unfinished.rename(text)
    return text


def main() -> None:
    """Read the command line; leave with 2 on wrong use, with one line that says what was wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m compute_node.training",
        description="Train the embedded model on a CPU. A stopped run is resumed from --out.",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the state and the checkpoint")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--minutes", type=float, help="minutes to train in all, over every resumed run")
    budget.add_argument("--steps", type=int, help="steps of 4,096 tokens to train in all")
    budget.add_argument(
        "--held-out", type=Path, metavar="FILE", help="write what the embedded model has not seen, and end"
    )
    parser.add_argument("--text", type=Path, help="folder of *.txt files (default: made from Debian packages)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: 1)")
    arguments = parser.parse_args()
    if arguments.held_out is None and not (arguments.minutes or arguments.steps or 0) > 0:
        parser.error("--minutes and --steps must be more than zero")
    if arguments.threads < 1:
        parser.error("--threads must be at least 1")
    try:
        run(arguments)
    except TierdError as error:
        parser.exit(error.exit_code, f"{parser.prog}: {error}\n")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
