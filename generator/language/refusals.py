"""`Refusals`: the Python protocols that a traced value cannot serve, each with what to write instead."""

from __future__ import annotations

from typing import Any, NoReturn

from ..errors import TraceError
from .sites import source_site
from .tracing import current, noted

BRANCH_REMEDY = (
    "A traced value has no truth value, because one kernel serves every index. Use `where(condition, a, b)` instead of"
    " `if`, `&`, `|`, `~` (with parentheses around comparisons) instead of `and`, `or`, `not`, and"
    " `(a <= b) & (b < c)` instead of `a <= b < c`."
)


def trace_error(rule: str) -> TraceError:
    """A TraceError with `rule` and the user's source line that broke it. The trace fails, whoever catches it."""
    return noted(TraceError(f"{rule}{source_site()}"))


def stand_in_text(plain: str) -> str:
    """`plain`, the text of a traced value or table. Raises TraceError while a function is traced."""
    if current() is None:
        return plain
    raise trace_error(
        "A traced value has no text: str(), repr(), format() and f-strings would show a stand-in, and comparing it"
        " takes one branch for every index. Compare the value itself: `x == 3`."
    )


class Refusals:
    """Base of the traced value: raises TraceError where Python asks it for a number it does not have."""

    __slots__ = ()

    def __bool__(self) -> NoReturn:
        raise trace_error(f"A branch or `and`/`or`/`not` depends on a traced value. {BRANCH_REMEDY}")

    def __hash__(self) -> int:
        raise trace_error(
            "A traced value cannot be hashed, so it is no key of a dict and in no set: its value is only known in the"
            " kernel. Use comparisons and `where`, or an index into a captured tensor."
        )

    def __int__(self) -> NoReturn:
        raise trace_error("int() of a traced value is not possible: its value is only known in the kernel.")

    def __index__(self) -> NoReturn:
        raise trace_error(
            "A traced int was used where Python needs a known integer (range(), a list index, a tensor that is not a"
            " plain captured variable). Loops must have literal bounds; to index a tensor, bind it to a variable"
            " outside the function and write table[index]."
        )

    def __float__(self) -> NoReturn:
        raise trace_error(
            "A traced value was passed to a function that needs a known number (math.* or numpy)."
            " Use exp, log, tanh, sqrt, abs, minimum and maximum of flashsmith.generator.language."
        )

    def __round__(self, *digits: Any) -> NoReturn:
        raise trace_error("round(), math.floor() and math.ceil() of a traced value are not part of the language.")

    def __trunc__(self) -> NoReturn:
        self.__round__()

    def __floor__(self) -> NoReturn:
        self.__round__()

    def __ceil__(self) -> NoReturn:
        self.__round__()

    def __complex__(self) -> NoReturn:
        self.__float__()

    def __divmod__(self, other: Any) -> NoReturn:
        raise trace_error("divmod() of a traced value is not part of the language. Write `a // b` and `a % b`.")

    def __rdivmod__(self, other: Any) -> NoReturn:
        self.__divmod__(other)

    def __rpow__(self, other: Any) -> NoReturn:
        raise trace_error("`**` takes a literal exponent from 1 to 8, but got a traced one. Use exp and log.")

    def __iter__(self) -> NoReturn:
        raise trace_error("A traced value is one number and cannot be iterated, unpacked or searched.")

    def __contains__(self, item: Any) -> NoReturn:
        self.__iter__()

    def __len__(self) -> NoReturn:
        self.__iter__()

    def __getitem__(self, index: Any) -> NoReturn:
        raise trace_error("A traced value is one number and cannot be indexed; only captured tensors can.")

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise trace_error("A mask or score function must not assign to an element: it has no side effects.")

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.__float__()
