"""Stream transforms: applied to the bytes of each tensor before they are stored, and undone when they are read.

The manifest names a transform by a descriptor such as `stream.zstd/1`; a reader finds it in a registry by that name.
"""

import abc
import io
from collections.abc import Sequence
from importlib.util import find_spec
from typing import IO, Any

from milepost.errors import CheckpointDamaged, InvalidRequest, UnsafeCheckpoint, UnsupportedFormat

_AT_ONCE_BYTES = 1 << 20


class Extension(abc.ABC):
    """Changes how data is stored. Readers find it by its name."""

    @staticmethod
    @abc.abstractmethod
    def registry_name() -> str:
        """The name, without version: `stream.zstd`, or with your own domain: `rot13@example.org`."""

    @staticmethod
    @abc.abstractmethod
    def from_descriptor(version: str) -> "Extension":
        """The extension that wrote with this version. Raises ValueError for versions that it cannot read."""

    @abc.abstractmethod
    def get_descriptor(self) -> str:
        """The text in the manifest: `name/version`."""


class StreamTransformExtension(Extension):
    """A transform of a stream of bytes, such as compression or encryption.

    >>> import gzip
    >>> class Gzip(milepost.planning.StreamTransformExtension):
    ...     registry_name = staticmethod(lambda: "gzip@example.org")
    ...     from_descriptor = staticmethod(lambda version: Gzip())
    ...     get_descriptor = lambda self: "gzip@example.org/1"
    ...     transform_to = lambda self, output: gzip.open(output, "wb")
    ...     transform_from = lambda self, input: gzip.open(input, "rb")
    >>> milepost.planning.register_extension(Gzip)
    >>> writer = milepost.planning.CheckpointWriter("memory://gzip", transforms=[Gzip()])
    >>> _ = milepost.save({"w": torch.ones(3)}, storage_writer=writer)
    >>> milepost.open("memory://gzip")["w"][:]
    tensor([1., 1., 1.])
    """

    @abc.abstractmethod
    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        """A stream that transforms what is written to it into `output`. Closing or flushing it ends the stream."""

    @abc.abstractmethod
    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # noqa: A002
        """A stream that gives back what was written, reading from `input`."""


class ZStandard(StreamTransformExtension):
    """Compression by zstd. Raises InvalidRequest if the module `zstandard` is not installed.

    >>> writer = milepost.planning.CheckpointWriter("memory://zstd", transforms=[milepost.planning.ZStandard()])
    >>> _ = milepost.save({"w": torch.zeros(1000)}, storage_writer=writer)
    >>> milepost.open("memory://zstd").manifest.tensors[0].transforms
    ('stream.zstd/1',)
    """

    def __init__(self) -> None:
        if not self.is_available():
            raise InvalidRequest("ZStandard needs the module `zstandard`: pip install 'milepost[zstd]'")

    @staticmethod
    def is_available() -> bool:
        """Whether the module is installed."""
        return find_spec("zstandard") is not None

    @staticmethod
    def registry_name() -> str:
        """`stream.zstd`."""
        return "stream.zstd"

    @staticmethod
    def from_descriptor(version: str) -> "ZStandard":
        """Any version 1."""
        if version.partition(".")[0] != "1":
            raise ValueError(f"Unknown extension version={version!r}")
        return ZStandard()

    def get_descriptor(self) -> str:
        """`stream.zstd/1`."""
        return f"{self.registry_name()}/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        """Compress."""
        import zstandard  # noqa: PLC0415

        stream: Any = zstandard.ZstdCompressor().stream_writer(output, closefd=False)
        return stream  # type: ignore[no-any-return]

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # noqa: A002
        """Decompress."""
        import zstandard  # noqa: PLC0415

        stream: Any = zstandard.ZstdDecompressor().stream_reader(input, closefd=False)
        return stream  # type: ignore[no-any-return]


class ExtensionRegistry:
    """The extensions that a reader knows, by name.

    >>> milepost.planning.ExtensionRegistry().from_descriptor_list(["stream.zstd/1"])[0].get_descriptor()
    'stream.zstd/1'
    """

    def __init__(self) -> None:
        self.extensions: dict[str, type[Extension]] = {ZStandard.registry_name(): ZStandard}

    def register(self, cls: type[Extension]) -> None:
        """Make an extension known to readers."""
        self.extensions[cls.registry_name()] = cls

    def from_descriptor_list(self, descriptors: Sequence[str]) -> Sequence[Extension]:
        """The extensions that wrote with these descriptors, in order. Raises ValueError for an unknown name."""
        found = []
        for descriptor in descriptors:
            name, _, version = descriptor.partition("/")
            if name not in self.extensions:
                raise ValueError(f"Unknown extension name={name!r}")
            found.append(self.extensions[name].from_descriptor(version))
        return found


REGISTRY = ExtensionRegistry()
"""Where `load` and `open` look; `milepost.register_extension` adds to it."""


def register_extension(cls: type[Extension]) -> None:
    """Register a stream transform for every later load of this process.

    >>> milepost.planning.register_extension(milepost.planning.ZStandard)
    """
    REGISTRY.register(cls)


def transformed(data: Sequence[memoryview], extensions: Sequence[StreamTransformExtension]) -> bytes:
    """The bytes as they are stored: the first extension is applied first."""
    out = io.BytesIO()
    streams: list[IO[bytes]] = [out]
    for extension in reversed(extensions):
        streams.append(extension.transform_to(streams[-1]))
    for view in data:
        for start in range(0, len(view), _AT_ONCE_BYTES):
            streams[-1].write(view[start : start + _AT_ONCE_BYTES])
    for stream in reversed(streams[1:]):
        stream.flush()
        if not isinstance(stream, io.BytesIO):
            stream.close()
    return out.getvalue()


def restored(
    stored: bytes, descriptors: Sequence[str], most_bytes: int, what: str, registry: ExtensionRegistry = REGISTRY
) -> bytes:
    """The bytes as they were before these transforms, the first of which was applied first.

    Raises UnsupportedFormat for one that is not registered, CheckpointDamaged for bytes that it did not make, and
    UnsafeCheckpoint where they would become more than `most_bytes`.
    """
    names = ", ".join(text[:80] for text in descriptors)
    try:
        extensions = registry.from_descriptor_list(descriptors)
    except (ValueError, InvalidRequest) as error:
        raise UnsupportedFormat(f"{what} was stored with {names}: {error}") from None
    stream: IO[bytes] = io.BytesIO(stored)
    for extension in reversed(extensions):
        if not isinstance(extension, StreamTransformExtension):
            raise UnsupportedFormat(f"{what} was stored with {names}, not all of which are stream transforms")
        stream = extension.transform_from(stream)
    found = bytearray()
    try:
        while len(found) <= most_bytes and (piece := stream.read(_AT_ONCE_BYTES)):
            found += piece
    except Exception as error:
        raise CheckpointDamaged(f"{what} cannot be restored by {names}: {error}") from error
    if len(found) > most_bytes:
        raise UnsafeCheckpoint(f"{what} would become more than {most_bytes} bytes by undoing {names}")
    return bytes(found)
