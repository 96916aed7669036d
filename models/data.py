"""Text as bytes: every file of a folder, joined in one fixed order and cut into random windows.

Always true here: the corpus depends only on the folder's contents and `max_bytes`, never on the order in which
the file system lists it; `batch(step)` depends only on the corpus, the seed and the step, so a run can start
again at any step and two runs see the same data.

Threads: a corpus is read-only after construction and may be shared.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

MAX_BYTES = 16 * 2**20
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib"})


def default_folder() -> Path:
    """The folder of Python's own standard library: text that every machine with this program has."""
    return Path(os.__file__).parent


class ByteCorpus:
    """The bytes of a folder's text files.

    Args:
      folder: Where to look, through all subfolders but hidden ones, caches, tests and installed packages;
        None takes Python's standard library.
      suffix: Only files that end so.
      max_bytes: Stop reading after so many bytes; bounds the memory.

    Raises:
      ValueError: The folder is missing, or holds less than two bytes in such files.
    """

    def __init__(
        self, folder: str | os.PathLike[str] | None = None, *, suffix: str = ".py", max_bytes: int = MAX_BYTES
    ) -> None:
        self.folder = default_folder() if folder is None else Path(folder)
        if not self.folder.is_dir():
            raise ValueError(f"data folder {str(self.folder)!r} does not exist or is no folder: name one with text")
        if max_bytes < 2:
            raise ValueError(f"max_bytes={max_bytes}: a corpus needs at least 2 bytes")
        self.data = np.frombuffer(_read(self.folder, suffix, max_bytes), dtype=np.uint8)
        if self.data.size < 2:
            raise ValueError(
                f"data folder {str(self.folder)!r} has no text in files that end in {suffix!r}: "
                "name another folder or suffix"
            )

    def batch(self, step: int, *, batch: int, seq: int, seed: int = 0) -> npt.NDArray[np.int32]:
        """Returns the windows of one step: int32 `[batch, seq + 1]`, values 0 to 255.

        Raises:
          ValueError: The corpus is shorter than a window.
        """
        if self.data.size < seq + 1:
            raise ValueError(
                f"data folder {str(self.folder)!r} has {self.data.size} bytes, less than one window of "
                f"{seq + 1}: lower the sequence length or name a larger folder"
            )
        starts = np.random.default_rng([seed, step]).integers(0, self.data.size - seq, size=batch)
        windows: npt.NDArray[np.int32] = self.data[starts[:, None] + np.arange(seq + 1)].astype(np.int32)
        return windows


def _read(folder: Path, suffix: str, max_bytes: int) -> bytes:
    """Joins the files in the order of their paths, a newline after each, up to `max_bytes` bytes.

    Raises:
      ValueError: A file cannot be read.
    """
    parts: list[bytes] = []
    left = max_bytes
    for path in _files(folder, suffix):
        if left <= 0:
            break
        try:
            with path.open("rb") as file:
                part = file.read(left)
        except OSError as error:
            raise ValueError(f"data file {str(path)!r} cannot be read: {error.strerror}") from error
        if part:
            parts.append(part + b"\n")
            left -= len(parts[-1])
    return b"".join(parts)[:max_bytes]


def _files(folder: Path, suffix: str) -> list[Path]:
    found: list[Path] = []
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith(".")]
        found.extend(Path(where, name) for name in names if name.endswith(suffix))
    return sorted(path for path in found if path.is_file())
