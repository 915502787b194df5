"""Turn text files into megatron's indexed data set (`<prefix>.bin`, `<prefix>.idx`), one token per byte.

    python cookbook/prepare_data.py --output-prefix data/stdlib            # Python's standard library
    python cookbook/prepare_data.py --input book.txt notes/ --output-prefix data/mine

Bytes are a vocabulary of 256 that needs no tokenizer file. Byte 0, which no text contains, ends each document; a file
that does contain it is not text and is left out, by name. The same files, in the order of their names, give the same
bytes out.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path

END_OF_DOCUMENT = 0


def text_files(inputs: list[Path]) -> Iterator[Path]:
    """Yield each file that is named, and for each folder its `*.py`, `*.txt` and `*.md` files, sorted by path."""
    for given in inputs:
        if given.is_file():
            yield given
        elif given.is_dir():
            yield from sorted(path for path in given.rglob("*") if path.suffix in {".py", ".txt", ".md"})
        else:
            raise SystemExit(f"{given}: no such file or folder; --input takes text files and folders that hold some")


def standard_library() -> list[Path]:
    """The source files of the running Python's standard library, without its tests and without site-packages."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
    return sorted(path for path in root.rglob("*.py") if skipped.isdisjoint(path.relative_to(root).parts))


def write_indexed_dataset(files: list[Path], output_prefix: Path) -> tuple[int, int]:
    """Write `<output_prefix>.bin` and `.idx`, one document per file, uint8 tokens; return (documents, tokens)."""
    output_prefix.parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(get_bin_path(str(output_prefix)), dtype=np.uint8)
    documents = tokens = 0
    for path in files:
        content = path.read_bytes()
        if END_OF_DOCUMENT in content:
            print(f"left out, since it holds a zero byte and so is not text: {path}")
            continue
        document = np.frombuffer(content + bytes([END_OF_DOCUMENT]), dtype=np.uint8)
        builder.add_document(document, lengths=[document.size])
        documents, tokens = documents + 1, tokens + document.size
    if documents == 0:
        raise SystemExit("no text found: --input takes text files and folders that hold *.py, *.txt or *.md files")
    builder.finalize(get_idx_path(str(output_prefix)))
    return documents, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, nargs="+", help="text files and folders (default: the standard library)")
    parser.add_argument("--output-prefix", type=Path, required=True, help="path of the data set without .bin and .idx")
    args = parser.parse_args()
    files = list(text_files(args.input)) if args.input else standard_library()
    documents, tokens = write_indexed_dataset(files, args.output_prefix)
    print(f"{args.output_prefix}.bin and .idx: {documents} documents, {tokens:,} tokens")


if __name__ == "__main__":
    main()
