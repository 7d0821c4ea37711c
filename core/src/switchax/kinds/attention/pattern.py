"""Masks that are known when a call is traced: a kernel can skip what they hide."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from switchax.checks import fail_type, fail_value, is_integer
from switchax.sameness import is_same

__all__ = ["MaskPattern"]

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Visible = Callable[[Ints, Ints], Any]

_WHERE = "MaskPattern"
_ROWS = 1024  # that are looked at together where all of a pattern is
_FAR = 2**31  # int64 holds sums of what is nearer
_NO_MESH = jax.sharding.AbstractMesh((), ())


class MaskPattern:
    """Which key each query row sees, the same for all samples and heads.

    A `mask` is an array of a program, and read when it runs; this is known before, so
    an operation that declares `mask_pattern` visits what it shows and nothing else. For
    any other that takes masks, core writes it as one. What else hides keys (causal,
    window, lengths, ids, a mask) hides them beside it.

        pattern = MaskPattern(lambda row, key: row // 256 == key // 256, 4096, 4096)
        out = switchax.attention(query, key, value, mask_pattern=pattern)

    Make a pattern once, outside of the function that is compiled: patterns are equal if
    they are of equal arrays, or of functions that nothing can tell apart, and each that
    is not is traced anew. The class has no subclasses.

    Args:
        visible: A bool array of numpy `[q_len, kv_len]`, which is copied; or a function
            of row and key numbers, int64 arrays of numpy `[n, 1]` and `[1, m]` from 0
            on, that returns bools which broadcast to `[n, m]`. It must say of each pair
            the same whenever, and beside whichever others, it is asked.
        q_len: Query rows, from 0; needed with a function.
        kv_len: Keys, likewise.

    Attributes:
        q_len: Query rows.
        kv_len: Keys.

    Raises:
        TypeError: If visible is neither, or not of dtype bool; if a function has no
            hash or comes without lengths, or they are no ints.
        ValueError: If an array is not of two axes, or lengths are not its own.
    """

    __slots__ = ("__dict__", "_bits", "_function", "_kv_len", "_q_len")

    def __init_subclass__(cls) -> None:
        got, todo = f"{cls.__name__}", "what is shown is the function's to say"
        raise fail_type(_WHERE, "no subclass", got, todo)

    def __init__(
        self,
        visible: Visible | NDArray[np.bool_],
        q_len: int | None = None,
        kv_len: int | None = None,
    ) -> None:
        self._q_len: int
        self._kv_len: int
        self._function: Visible | None = None
        self._bits: NDArray[np.uint8] | None = None
        given = {"q_len": q_len, "kv_len": kv_len}
        if isinstance(visible, np.ndarray):
            _check_array(visible, given)
            self._q_len, self._kv_len = visible.shape
            self._bits = np.packbits(np.asarray(visible), axis=1)
        elif callable(visible):
            self._q_len, self._kv_len = (_length(n, x) for n, x in given.items())
            self._function = _hashable(visible)
        else:
            got = f"a {type(visible).__name__}"
            todo = "an array of JAX goes in as mask, or by numpy.asarray"
            raise fail_type(_WHERE, "an array of numpy or a function", got, todo)

    @property
    def q_len(self) -> int:
        """Query rows."""
        return self._q_len

    @property
    def kv_len(self) -> int:
        """Keys."""
        return self._kv_len

    @classmethod
    def prefix(
        cls, prefix_len: int, q_len: int, kv_len: int, q_offset: int = 0
    ) -> MaskPattern:
        """Returns the mask of a prefix language model.

        Args:
            prefix_len: Keys that every row sees; of the others, those up to its own.
            q_len: Query rows.
            kv_len: Keys.
            q_offset: Key position of row 0.

        Raises:
            TypeError: If a number is no int.
            ValueError: If it is beyond 2**31.
        """
        numbers = _number("prefix_len", prefix_len), _number("q_offset", q_offset)
        return cls(_Prefix(*numbers), q_len, kv_len)

    @classmethod
    def chunked(
        cls, chunk: int, q_len: int, kv_len: int, q_offset: int = 0
    ) -> MaskPattern:
        """Returns the mask of chunked local attention.

        Args:
            chunk: Tokens of a chunk, from 1; a row sees the keys of its own.
            q_len: Query rows.
            kv_len: Keys.
            q_offset: Key position of row 0.

        Raises:
            TypeError: If a number is no int.
            ValueError: If it is beyond 2**31; for a chunk below 1.
        """
        numbers = _number("chunk", chunk), _number("q_offset", q_offset)
        if numbers[0] < 1:
            rule, todo = "a chunk of at least 1", "it is a number of tokens"
            raise fail_value(_WHERE, rule, f"chunk={chunk!r}", todo)
        return cls(_Chunks(*numbers), q_len, kv_len)

    def tile(self, rows: slice, keys: slice) -> Bools:
        """Returns which of some keys some rows see, bool `[rows, keys]`.

        Args:
            rows: From where to where, within `q_len`; without a step.
            keys: Likewise, within `kv_len`.

        Raises:
            TypeError: If the function returns anything but bools.
            ValueError: If what it returns has another shape.
        """
        first, end, _ = rows.indices(self.q_len)
        start, stop, _ = keys.indices(self.kv_len)
        shape = max(end - first, 0), max(stop - start, 0)
        if 0 in shape:
            return np.zeros(shape, np.bool_)
        if self._bits is not None:
            byte = start // 8
            bits = np.unpackbits(self._bits[first:end, byte : -(-stop // 8)], axis=1)
            return bits[:, start - 8 * byte : stop - 8 * byte].astype(np.bool_)
        assert self._function is not None  # narrows the type
        row = np.arange(first, end, dtype=np.int64)[:, None]
        key = np.arange(start, stop, dtype=np.int64)[None]
        # It may be of jnp, and the call be traced, on a mesh or within shard_map.
        with (
            jax.ensure_compile_time_eval(),
            jax.sharding.use_abstract_mesh(_NO_MESH),
        ):
            found = _as_array(self._function(row, key))
        if found.dtype != np.bool_:
            got, todo = f"dtype {found.dtype}", "compare row and key"
            raise fail_type(_WHERE, "the function to return bools", got, todo)
        try:
            return np.broadcast_to(found, shape)
        except ValueError:
            rule, got = f"the function to return {shape}", f"{found.shape}"
            todo = "rows are [n, 1] and keys [1, m]"
            raise fail_value(_WHERE, rule, got, todo) from None

    def padded(self, q_len: int, kv_len: int) -> MaskPattern:
        """Returns the pattern of more rows and keys, of which those beyond see nothing.

        Args:
            q_len: Rows, at least as many.
            kv_len: Keys, likewise.
        """
        if (q_len, kv_len) == (self.q_len, self.kv_len):
            return self
        return MaskPattern(_Padded(self), q_len, kv_len)

    def __reduce__(self) -> Any:
        """As what it shows: functions are not always to be had elsewhere."""
        if isinstance(self._function, (_Prefix, _Chunks, _Padded)):
            return MaskPattern, (self._function, self.q_len, self.kv_len)
        return _of_bits, (self._packed(), self.kv_len)

    def __copy__(self) -> MaskPattern:
        return self  # nothing changes it

    def __deepcopy__(self, memo: Any) -> MaskPattern:
        return self

    def _packed(self) -> NDArray[np.uint8]:
        parts = [np.packbits(rows, axis=1) for _, rows in self._strips()]
        return np.concatenate([np.zeros((0, -(-self.kv_len // 8)), np.uint8), *parts])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Returns all of it, bool `[q_len, kv_len]`."""
        whole = np.zeros((self.q_len, self.kv_len), np.bool_)
        for first, rows in self._strips():
            whole[first : first + len(rows)] = rows
        return whole if dtype is None else whole.astype(dtype)

    def _strips(self) -> Iterator[tuple[int, Bools]]:
        for first in range(0, self.q_len, _ROWS):
            yield first, self.tile(slice(first, first + _ROWS), slice(None))

    @functools.cached_property
    def digest(self) -> str:
        """Hexadecimal text that is the same for the same pairs, in every process."""
        found = hashlib.sha256(f"{self.q_len}x{self.kv_len}".encode())
        found.update(self._packed().tobytes())
        return found.hexdigest()

    def __str__(self) -> str:
        return f"{self.q_len}x{self.kv_len}:{self.digest[:16]}"

    def __repr__(self) -> str:
        of = "an array" if self._function is None else f"{self._function!r}"
        return f"<MaskPattern {self.q_len}x{self.kv_len} of {of}>"

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, MaskPattern) or hash(self) != hash(other):
            return False
        if (self.q_len, self.kv_len) != (other.q_len, other.kv_len):
            return False
        if self._function is None and other._function is None:
            return self.digest == other.digest
        return is_same(self._function, other._function)

    def __hash__(self) -> int:
        return hash((self.q_len, self.kv_len, self._function))

    def is_same_as(self, other: object) -> bool:
        """Whether nothing can tell two patterns apart."""
        return self == other


def _as_array(found: Any) -> NDArray[Any]:
    """Returns what a function said of pairs."""
    if isinstance(found, np.ma.MaskedArray):
        got, todo = "a masked array", "fill it: numpy's masks are another thing"
        raise fail_type(_WHERE, "the function to return bools", got, todo)
    try:
        return np.asarray(found)
    except jax.errors.TracerArrayConversionError as error:
        got, todo = "a traced value", "what depends on one goes in as mask"
        raise fail_type(_WHERE, "the function to return bools", got, todo) from error


def _check_array(visible: NDArray[Any], given: dict[str, int | None]) -> None:
    if isinstance(visible, np.ma.MaskedArray):
        todo = "fill it: numpy's masks are another thing"
        raise fail_type(_WHERE, "an array or a function", "a masked array", todo)
    if visible.dtype != np.bool_:
        got, todo = f"dtype {visible.dtype}", "pass mask != 0"
        raise fail_type(_WHERE, "an array of dtype bool", got, todo)
    if visible.ndim != 2:
        got, todo = f"shape {visible.shape}", "it is the same for all heads"
        raise fail_value(_WHERE, "an array [q_len, kv_len]", got, todo)
    for (name, length), own in zip(given.items(), visible.shape, strict=True):
        if length is not None and _length(name, length) != own:
            got, todo = f"{name}={length}", "leave it out"
            raise fail_value(_WHERE, f"the array's {name}={own}", got, todo)


def _hashable(function: Visible) -> Visible:
    """Returns a function; raises if it has no hash, by which programs are kept."""
    try:
        hash(function)
    except TypeError as error:
        got, todo = str(error), "a def, a lambda or a frozen dataclass has one"
        raise fail_type(_WHERE, "a function with a hash", got, todo) from error
    return function


def _length(name: str, value: Any) -> int:
    if is_integer(value) and value >= 0:
        return int(value)
    got, todo = f"{name}={value!r}", "it is that of the calls"
    raise fail_type(_WHERE, f"{name} as an int from 0 on", got, todo)


def _number(name: str, value: Any) -> int:
    if not is_integer(value):
        got, todo = f"{name}={value!r}", "it is a number of tokens"
        raise fail_type(_WHERE, f"{name} as an int", got, todo)
    if abs(value) > _FAR:
        got, todo = f"{name}={value}", "no sequence is as long"
        raise fail_value(_WHERE, f"{name} within 2**31", got, todo)
    return int(value)


def _of_bits(bits: NDArray[np.uint8], kv_len: int) -> MaskPattern:
    pairs = np.unpackbits(bits, axis=1)[:, :kv_len] if kv_len else bits
    return MaskPattern(pairs.astype(np.bool_))


@dataclasses.dataclass(frozen=True)
class _Prefix:
    prefix_len: int
    q_offset: int

    def __call__(self, row: Ints, key: Ints) -> Any:
        return (key < self.prefix_len) | (key <= row + self.q_offset)


@dataclasses.dataclass(frozen=True)
class _Chunks:
    chunk: int
    q_offset: int

    def __call__(self, row: Ints, key: Ints) -> Any:
        return (row + self.q_offset) // self.chunk == key // self.chunk


@dataclasses.dataclass(frozen=True)
class _Padded:
    """A pattern with more rows and keys; it is asked for ranges."""

    pattern: MaskPattern

    def __call__(self, row: Ints, key: Ints) -> Any:
        found = np.zeros((row.size, key.size), np.bool_)
        rows = slice(int(row[0, 0]), int(row[-1, 0]) + 1)
        inner = self.pattern.tile(rows, slice(int(key[0, 0]), int(key[0, -1]) + 1))
        found[: inner.shape[0], : inner.shape[1]] = inner
        return found
