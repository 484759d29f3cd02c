"""Command-line flags made from the config dataclasses: one flag a field. TensorFlow-free."""

import ast
import contextlib
import dataclasses
import functools
import inspect
import io
import os
import re
import textwrap
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from absl import flags as absl_flags

from tfbig.errors import UserError, near_matches
from tfbig.number_rules import integer_problem
from tfbig.together import on_every_rank


@functools.cache
def field_help(section: type) -> dict[str, str]:
    """Returns {field: its docstring line} of a config dataclass, read from its source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    assert isinstance(tree, ast.ClassDef)
    texts = {}
    for statement, following in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            texts[statement.target.id] = str(following.value.value)
    return texts


def _choices(section: type, name: str) -> tuple[str, ...]:
    """Returns the allowed words of a Literal field, () of any other."""
    hint = typing.get_type_hints(section)[name]
    return typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()


# Marks a field whose text is no name of a file: a ~ in it stays.
FreeText = typing.Annotated[str, "free text"]
_ILLEGAL = re.compile(  # absl's `flag --NAME=VALUE: REASON`, VALUE being any text
    r"flag --(\w+)=(.*?): (?:invalid literal|could not convert|\('Non-boolean)", re.DOTALL
)
_HOME = re.compile(r"(?:^|(?<=[,:]))~[^/,:]*")


def expand_home(text: str) -> str:
    """Returns a value with ~ and ~user replaced where a path begins, as shells do in assignments.

    Args:
      text: path, or several with commas, each perhaps behind a word and a colon.

    >>> expand_home("a~b")
    'a~b'
    """
    return _HOME.sub(lambda match: os.path.expanduser(match[0]), text)


def _may_be_path(section: type, name: str) -> bool:
    return typing.get_type_hints(section, include_extras=True)[name] is str


def _define(
    values: absl_flags.FlagValues, section: type, item: dataclasses.Field, default: object
) -> None:
    """Defines the flag of one field; None stands for "not given"."""
    hint = typing.get_type_hints(section)[item.name]
    text = field_help(section).get(item.name, "")
    choices = _choices(section, item.name)
    if choices:
        text += f" One of: {', '.join(choices)}."
    shown = "''" if default == "" else default
    text += f" (default: {shown})"
    kinds: dict[typing.Any, typing.Callable[..., typing.Any]] = {
        bool: absl_flags.DEFINE_boolean,
        int: absl_flags.DEFINE_integer,
        float: absl_flags.DEFINE_float,
        tuple: absl_flags.DEFINE_multi_string,
    }
    define = kinds.get(typing.get_origin(hint) or hint, absl_flags.DEFINE_string)
    define(item.name, None, text, flag_values=values, module_name=section.__doc__)


class Flags:
    """The flags of one command.

    Args:
      command: name of the command, e.g. "train".
      sections: config dataclasses whose fields become flags.
      common: the flags that `--help` shows; `--helpfull` shows all. Empty means all.
      summary: one line that says what the command does.
      defaults: what fields are without their flags, where that is not the section's default.
    """

    def __init__(
        self,
        command: str,
        sections: Sequence[type],
        summary: str,
        common: Sequence[str] = (),
        defaults: Mapping[str, object] | None = None,
    ) -> None:
        self._command, self._summary = command, summary
        self._sections, self._common = sections, common
        self._values = absl_flags.FlagValues()
        for section in sections:
            for item in dataclasses.fields(section):
                _define(self._values, section, item, (defaults or {}).get(item.name, item.default))
        for name, text in (("help", "Shows the common flags."), ("helpfull", "Shows all flags.")):
            absl_flags.DEFINE_boolean(name, False, text, flag_values=self._values)

    @on_every_rank(is_agreed=False)
    def parse(self, arguments: Sequence[str], positional: bool = False) -> dict[str, typing.Any]:
        """Returns the values that were given, by field name.

        Args:
          arguments: what follows the command's name.
          positional: whether words that are no flags are allowed; they come back as
            "arguments".

        Raises:
          UserError: an unknown flag (with near matches) or a value of the wrong kind.
          SystemExit: after --help.
        """
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                rest = self._values([self._command, *arguments])[1:]
        except absl_flags.UnrecognizedFlagError as error:
            known = [name for name in self._values if name not in ("help", "helpfull")]
            name = error.flagname
            raise UserError(
                f"unknown flag --{name}.{near_matches(name, known)} `--helpfull` lists all flags."
            ) from None
        except absl_flags.IllegalFlagValueError as error:
            raise UserError(self._illegal_value(str(error))) from None
        except absl_flags.Error as error:
            text = " ".join(str(error).removeprefix("ERROR:: ").split())
            raise UserError(f"{text.rstrip('.')}; `--helpfull` lists all flags.") from None
        if self._values["help"].value or self._values["helpfull"].value:
            print(self.help_text(full=bool(self._values["helpfull"].value)))
            raise SystemExit(0)
        if rest and not positional:
            raise UserError(f"unexpected argument {rest[0]!r}: options are given as --name=value.")
        given = {
            name: self._values[name].value
            for name in self._field_names()
            if self._values[name].present
        }
        for name, value in given.items():
            if problem := integer_problem(name, value):
                raise UserError(problem)
        self._check_choices(given)
        for section in self._sections:
            for item in dataclasses.fields(section):
                if item.name in given and _may_be_path(section, item.name):
                    given[item.name] = expand_home(str(given[item.name]))
        given = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
        if positional:
            given["arguments"] = tuple(rest)
        return given

    def _illegal_value(self, text: str) -> str:
        """Returns a line of ours for absl's."""
        match = _ILLEGAL.match(text)
        if match is None or match[1] not in self._values:
            return " ".join(text.split())
        name, value = match[1], " ".join(match[2].split())
        default = next(
            item.default
            for section in self._sections
            for item in dataclasses.fields(section)
            if item.name == name
        )
        wanted = {
            "bool": f"neither true nor false: give --{name} or --no{name}",
            "int": f"no whole number: give e.g. --{name}={default}",
            "float": f"no number: give e.g. --{name}={default}",
        }
        return f"--{name}={value} is {wanted[self._values[name].flag_type()]}."

    def parse_action(
        self, command: str, actions: Collection[str], arguments: Sequence[str]
    ) -> tuple[str, dict[str, Any]]:
        """Returns the one word among the arguments, an action, and the given flag values.

        Args:
          command: the command's name.
          actions: those there are.
          arguments: of the command line.

        Raises:
          UserError: no such action, or a flag as `parse` refuses.
        """
        given = self.parse(arguments, positional=True)
        words = given.pop("arguments")
        if len(words) != 1 or words[0] not in actions:
            word = words[0] if words else ""
            raise UserError(
                f"say what to do: tfbig {command} {'|'.join(actions)}."
                f"{near_matches(word, list(actions))}"
            )
        return words[0], given

    def help_text(self, full: bool) -> str:
        """Returns the text of --help, or of --helpfull."""
        lines = [f"python -m tfbig.{self._command}: {self._summary}", ""]
        for section in self._sections:
            names = [f.name for f in dataclasses.fields(section)]
            if not full and self._common:
                names = [name for name in names if name in self._common]
            if not names:
                continue
            if full:
                lines.append((section.__doc__ or "").splitlines()[0])
            for name in names:
                text = f"  --{name}: {self._values[name].help}"
                lines += textwrap.wrap(text, width=96, subsequent_indent="      ")
            if full:
                lines.append("")
        if not full and self._common:
            lines += ["", "--helpfull lists all flags; --flagfile=FILE reads flags from a file."]
        return "\n".join(lines)

    def _field_names(self) -> Iterable[str]:
        return [f.name for section in self._sections for f in dataclasses.fields(section)]

    def _check_choices(self, given: dict[str, typing.Any]) -> None:
        for section in self._sections:
            for item in dataclasses.fields(section):
                allowed = _choices(section, item.name)
                if item.name in given and allowed and given[item.name] not in allowed:
                    value = given[item.name]
                    raise UserError(
                        f"--{item.name}={value} is not one of {', '.join(allowed)}."
                        f"{near_matches(str(value), list(allowed))}"
                    )
