"""`pagetable serve`: options generated from the settings, also taken from the environment and from a YAML file."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from pagetable.serving.settings import ABOUT, DEFAULTS, GROUPS, About, ServerSettings, check_type, types_of

_OTHER = "Other"


class _Text(click.types.StringParamType):
    """A text, or what its setting's parser makes of it. In the environment commas separate several."""

    name = "text"

    def __init__(self, parse: Callable[[str], Any] = str) -> None:
        self.parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self.parse(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)

    def split_envvar_value(self, rv: str) -> list[str]:
        return [part.strip() for part in rv.split(",")]


class _SettingOption(click.Option):
    """The option of one setting."""

    def __init__(self, name: str, about: About) -> None:
        self.about = about
        types, flag = types_of(name), name.replace("_", "-")
        several, is_flag = tuple in types, bool in types
        super().__init__(
            [f"--{flag}/--no-{flag}" if is_flag else f"--{flag}", name],
            type=_click_type(types, about),
            multiple=several,
            default=DEFAULTS[name],
            show_default=about.default is None,
            envvar=_variable(name),
            help=about.help + (f"  [default: {about.default}]" if about.default else ""),
        )

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """As click does, but a secret that was meant to be given and is empty must not open the server."""
        value = super().resolve_envvar_value(ctx)
        if value is None and self.about.secret and self.envvar in os.environ:
            raise click.UsageError(f"{self.envvar} is set but empty: give it a key, or unset it")
        return value


class _ModelArgument(click.Argument):
    """MODEL, which stands in the help among the settings."""

    about = ABOUT["model"]

    def __init__(self) -> None:
        super().__init__(["model"], required=False, default=DEFAULTS["model"], envvar=_variable("model"))

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        return "MODEL", f"{self.about.help}  [default: {self.default}]"


class _GroupedCommand(click.Command):
    """A command whose help lists its options under the groups of the settings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for group in (*GROUPS, _OTHER):
            options = [option for option in self.get_params(ctx) if _group(option) == group]
            with formatter.section(group):
                formatter.write_dl([line for option in options if (line := option.get_help_record(ctx))])


def _group(option: click.Parameter) -> str:
    return option.about.group if isinstance(option, _SettingOption | _ModelArgument) else _OTHER


def _click_type(types: frozenset[type], about: About) -> click.ParamType[Any]:
    if about.choices:
        return click.Choice(about.choices)
    if about.parse or types & {tuple, str}:
        return _Text(about.parse or str)
    return click.BOOL if bool in types else click.INT if int in types else click.FLOAT


def _variable(name: str) -> str:
    return f"PAGETABLE_{name.upper()}"


def read_config(path: str | Path) -> dict[str, Any]:
    """The settings in a YAML file, by name. ValueError for an unknown one or a value of a wrong type.

    The keys are the flags' names, with dashes or underscores.
    """
    found: dict[str, Any] = {}
    for key, value in _read_yaml(path).items():
        name = str(key).replace("-", "_")
        if name not in ABOUT:
            raise ValueError(f"{path}: there is no setting {str(key)[:80]!r}{_near(name)}")
        if name in found:
            raise ValueError(f"{path}: {key!r} is given twice, with a dash and with an underscore")
        try:
            found[name] = _value_from_yaml(name, value)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    return found


def _value_from_yaml(name: str, value: Any) -> Any:
    if tuple in types_of(name):
        value = tuple(value) if isinstance(value, list) else (value,)
    elif isinstance(value, str) and (parse := ABOUT[name].parse):
        value = parse(value)
    check_type(name, value)
    return value


def _near(name: str) -> str:
    known = difflib.get_close_matches(name, ABOUT)
    return f"; did you mean {' or '.join(near.replace('_', '-') for near in known)}?" if known else ""


def _read_yaml(path: str | Path) -> dict[Any, Any]:
    with _naming_the_extra():
        import yaml  # type: ignore[import-untyped]
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:  # its own message would show a part of the line, which may be a key
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}" if mark else "something in it"
        raise ValueError(f"{path}: {where} is not valid YAML") from None
    if not isinstance(content or {}, dict):
        raise ValueError(f"{path}: write one setting a line, such as `port: 8000`")
    return content or {}


@contextmanager
def _naming_the_extra() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("pagetable"):
            raise
        raise click.ClickException(
            f"{error}. `pagetable serve` needs pagetable with its extras 'llm' and 'serve'"
        ) from error


def _use_config(ctx: click.Context, _: click.Parameter, path: str | None) -> None:
    """Below the command line and the environment, above the defaults: what click calls its default map."""
    if path is not None:
        ctx.default_map = read_config(path)


def _serve(**given: Any) -> None:
    """Serve MODEL over HTTP, with the API of OpenAI.

    Every option can also be set in the environment, as PAGETABLE_PORT for --port (commas between several values), and
    in a YAML file given with --config (`port: 8000`). The command line goes before the environment, the environment
    before the file.
    """
    secrets = [name for name, about in ABOUT.items() if about.secret]
    source = click.get_current_context().get_parameter_source
    visible = any(source(name) is ParameterSource.COMMANDLINE for name in secrets)
    settings = ServerSettings(**given, keys_on_command_line=visible)
    with _naming_the_extra():
        from pagetable.serving.server import serve as run
    run(settings)


serve = _GroupedCommand(
    "serve",
    callback=_serve,
    help=_serve.__doc__,
    context_settings={"max_content_width": 120},
    params=[
        _ModelArgument(),
        *(_SettingOption(name, about) for name, about in ABOUT.items() if name != "model"),
        click.Option(
            ["--config"],
            type=click.Path(exists=True, dir_okay=False),
            is_eager=True,
            expose_value=False,
            callback=_use_config,
            envvar=_variable("config"),
            help="YAML file with settings.",
        ),
    ],
)
