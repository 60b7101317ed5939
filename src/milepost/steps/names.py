"""The names of steps: a pattern such as `checkpoint-{step}` turns a step into a name and a name back into a step."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from milepost.errors import InvalidRequest, StorageError, UnsafeCheckpoint
from milepost.store import LocalStore, Store
from milepost.store.base import check_name
from milepost.store.folders import again, is_gone

OWN_NAMES = "step-{step:010}"
"""How the folders of steps are named, unless the caller says otherwise: names sort as steps do."""
MAX_STEP = 9_999_999_999
"""The last step whose name sorts behind all others."""
_FIELD = re.compile(r"\{step(?::0([1-9][0-9]?)d?)?\}")
_DIGITS = re.compile(r"([0-9]{1,18})[^0-9]*")
_MAX_NAME_BYTES = 255


@dataclass(frozen=True)
class StepPattern:
    """Names with a step in them. Each step has one name and each name one step, or it is none of these names.

    `{step}` stands for the step, `{step:06}` for the step with zeros in front up to 6 digits. A `*` stands for any
    text; a pattern that has one cannot make names. Raises InvalidRequest, naming the option that the pattern is from.
    """

    text: str
    option: str = "names"

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise InvalidRequest(f"{self.option}: a pattern is a string, not {self.text!r}")
        around = _FIELD.split(self.text)[::2]
        if len(around) != 2 or any(sign in part for part in around for sign in "{}"):
            raise self._wrong("has {step} in it, once; or {step:06} for six digits")
        if around[0].endswith("*") or around[1].startswith("*") or "**" in self.text:
            raise self._wrong("has other signs between {step} and *, and between * and *")
        name = self._around[0] + self.digits(0) + self._around[1]
        try:
            whole = "/" not in name and check_name(name) and len(os.fsencode(name)) < _MAX_NAME_BYTES - 10
        except (UnsafeCheckpoint, UnicodeEncodeError):
            whole = False
        if not whole:
            raise self._wrong("makes the name of one folder, not a path")

    def _wrong(self, rule: str) -> InvalidRequest:
        return InvalidRequest(f"{self.option}: a pattern {rule}; {self.text!r} does not")

    @property
    def makes_names(self) -> bool:
        """Whether a step has a name by this pattern."""
        return "*" not in self.text

    @cached_property
    def _around(self) -> tuple[str, str]:
        before, _, after = _FIELD.split(self.text)
        return before, after

    @cached_property
    def _width(self) -> int:
        found = _FIELD.search(self.text)
        return int(found[1]) if found is not None and found[1] else 1

    @property
    def prefix(self) -> str:
        """What all names start with."""
        return self._around[0].partition("*")[0]

    def digits(self, step: int) -> str:
        """The step as it stands in a name."""
        return f"{step:0{self._width}d}"

    def name(self, step: int) -> str:
        """The name of a step."""
        assert self.makes_names
        return self.digits(step).join(self._around)

    def step(self, name: str) -> int | None:
        """The step in a name; None if the pattern does not make it. Raises InvalidRequest if two steps are in it."""
        found = {match[1] for match in (regex.fullmatch(name) for regex in self._readings) if match}
        if len(found) > 1:
            raise InvalidRequest(
                f"{self.option}: by {self.text!r}, {name!r} is step {' and step '.join(sorted(found))}"
            )
        digits = found.pop() if found else ""
        return int(digits) if digits and digits == self.digits(int(digits)) else None

    @cached_property
    def _readings(self) -> list[re.Pattern[str]]:
        """The pattern as a regular expression, with each `*` as long and as short as it can be."""
        found = []
        for some in (".*", ".*?"):
            before, after = (some.join(map(re.escape, part.split("*"))) for part in self._around)
            found.append(re.compile(f"{before}([0-9]{{1,19}}){after}", re.DOTALL))
        return found


class StepNames:
    """How the steps under a root are named: `own` for those that are saved and read, `others` for those only read."""

    def __init__(self, own: str = OWN_NAMES, others: Sequence[str] = ()) -> None:
        self.own = StepPattern(own)
        if not self.own.makes_names:
            raise InvalidRequest(f"names: {own!r} has a *, so a step has no name; put it into also_read")
        if isinstance(others, (str, bytes)) or not isinstance(others, Sequence):
            raise InvalidRequest(f"also_read is a list of patterns, not {others!r}")
        self.others = tuple(StepPattern(text, "also_read") for text in others)

    def step_of(self, name: str, *, file: bool) -> int | None:
        """The step in a name of a folder or of a file. A file is a step only by the patterns of others."""
        own = None if file else self.own.step(name)
        return own if own is not None else next((s for p in self.others if (s := p.step(name)) is not None), None)


def _entries(root: LocalStore) -> list[tuple[str, bool]]:
    with os.scandir(root.root) as entries:
        plain = (entry for entry in entries if not entry.is_symlink())
        return [(e.name, e.is_file()) for e in plain if e.is_file() or e.is_dir()]


def is_folder(path: Path) -> bool:
    """Whether a folder can be opened. One that another machine removed may still be listed, and even have a status."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    except OSError as error:
        return not is_gone(error)
    return True


def names_in(root: Store, prefixes: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """The names directly under a root, and whether each is a file. Links are not among them.

    Elsewhere than in a local folder, only names that start with one of the prefixes are looked for.
    """
    if isinstance(root, LocalStore):
        try:
            yield from again(partial(_entries, root))
        except FileNotFoundError:
            return
        except OSError as error:
            raise StorageError(f"cannot list {root.url}: {error.strerror or error}", errno=error.errno) from error
        return
    found = {name for prefix in set(prefixes) for name in root.list(prefix, shallow=True)}
    folders = {name.removesuffix("/") for name in found if name.endswith("/")}
    yield from ((name, False) for name in folders)
    yield from ((name, True) for name in found if not name.endswith("/") and name not in folders)


def step_in(name: str) -> int | None:
    """The number of a step in a name: by Milepost's own names, else the last number in it."""
    own = StepNames().own.step(name)
    found = None if own is not None else list(_DIGITS.finditer(name))
    return own if own is not None else int(found[-1][1]) if found else None
