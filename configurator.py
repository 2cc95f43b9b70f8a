"""
Settings are plain assignments at the top of a script, each with a comment:

    batch_size = 16  # sequences per micro-step              <- has the type of its default
    flops_budget: float | None = None  # FLOPs to spend      <- None: needs an annotation
    settings, given = configure(globals(), argv=sys.argv[1:])

All lower-case assignments above that line, or above the first function, are settings.
Config files and --key=value override them, in the order given:

    python train.py config/gpt2_124m.py --learning_rate=3e-4

The fields of dataclasses passed to configure are settings too. A config file holds lines of
key = literal, or arithmetic of numbers such as 12 * 8. It is parsed, never executed. The line
include = "other.py" stands for the lines of another file in its folder.
"""

import ast
import difflib
import inspect
import io
import operator
import os
import sys
import textwrap
import tokenize
from typing import NamedTuple

TYPES = {t.__name__: t for t in (bool, int, float, str, tuple)} | {"None": type(None)}
OPERATIONS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Pow: operator.pow,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv,
    ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip
defaults = {}  # of the settings that configure() read last; echo() leaves them out


class Setting(NamedTuple):
    default: object
    types: tuple
    comment: str


def configure(namespace, *dataclasses, argv, unused=()):
    """Set the settings in a script's namespace. Returns two dicts: (all settings, given settings).

    The first has every setting of the script and the dataclasses. The second has only those that
    config files or the command line set. Config files may hold settings that are unused here.
    """
    own = read_settings(open(namespace["__file__"]).read())
    known = dict(own)
    for cls in dataclasses:
        known |= read_settings(textwrap.dedent(inspect.getsource(cls)), of=cls.__name__)
    defaults.clear()
    defaults.update({key: setting.default for key, setting in known.items()})
    if "--help" in argv or "-h" in argv:
        print((namespace["__doc__"] or "").strip() + "\n\nsettings, as --key=default:")
        for key, setting in known.items():
            print(f"  {f'--{key}={setting.default}':<36} {setting.comment}")
        raise SystemExit(None)
    given = {}
    for source, key, value in overrides(argv, known):
        if key in unused and key not in known and source != "command line":
            continue
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0)
            nearest = f"; the nearest is {near[0]!r}" if near else ""
            raise SystemExit(f"{source}: there is no setting {key!r}{nearest}; --help lists all")
        given[key] = convert(source, key, value, known[key].types)
    values = defaults | given
    namespace.update({key: values[key] for key in own})
    return values, given


def read_settings(text, of=None):
    """{name: Setting} of the settings in the source text, or in its dataclass `of`."""
    body = ast.parse(text).body
    if of is not None:
        classes = (node for node in body if isinstance(node, ast.ClassDef))
        body = next(node for node in classes if node.name == of).body
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
    settings = {}
    for node in body:
        if isinstance(node, ast.FunctionDef) or "configure(" in ast.unparse(node):
            break
        if not isinstance(node, (ast.Assign, ast.AnnAssign)):
            continue
        name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
        if name != name.lower():
            continue  # a constant
        default = ast.literal_eval(node.value)
        types = (type(default),)
        if isinstance(node, ast.AnnAssign):
            types = tuple(TYPES[t.strip()] for t in ast.unparse(node.annotation).split("|"))
        settings[name] = Setting(default, types, comments.get(node.end_lineno, ""))
    return settings


def overrides(argv, known):
    """Yield (source, key, value) from the command line and the config files it names, in order."""
    for arg in argv:
        if arg.startswith("--"):
            key, equals, text = arg[2:].partition("=")
            if not equals:
                raise SystemExit(f"{arg}: write it as --key=value")
            yield "command line", key, literal(text, known[key].types if key in known else ())
        else:
            yield from read_file(arg)


def literal(text, types):
    """Parse text as a literal. If that fails, or only a string fits, return the text as it is."""
    try:
        value = ast.literal_eval(text.strip())
    except (ValueError, TypeError, SyntaxError):
        return text
    is_text = str in types and (type(value) is str or type(value) not in types)
    return text if is_text else value


def value_of(node):
    """The value of a literal, or of arithmetic such as 12 * 8 with numbers up to 1e30."""
    if not isinstance(node, (ast.BinOp, ast.UnaryOp)):
        return ast.literal_eval(node)
    parts = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.operand]
    numbers = [value_of(part) for part in parts]
    fits = lambda number, most=1e30: type(number) in (int, float) and abs(number) <= most
    if not all(map(fits, numbers)) or (isinstance(node.op, ast.Pow) and not fits(numbers[1], 100)):
        raise ValueError("not a number, or too large")
    value = OPERATIONS[type(node.op)](*numbers)
    if not fits(value):
        raise ValueError("not a real number, or too large")
    return value


def read_file(path, outer=()):
    """Yield (path, key, value) for every line of a config file and of the files it includes."""
    own = os.path.realpath(path)
    if own in outer:
        raise SystemExit(f"{path}: includes itself")
    hint = "settings are written --key=value"
    try:
        body = ast.parse(open(path).read()).body
    except FileNotFoundError:
        raise SystemExit(f"{path}: no such config file; {hint}") from None
    except (OSError, ValueError, SyntaxError) as error:
        raise SystemExit(f"{path}: not a readable config file ({error}); {hint}") from None
    for node in body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        try:
            (target,) = node.targets
            key, value = target.id, value_of(node.value)
        except (AttributeError, ValueError, TypeError, KeyError, ArithmeticError):
            got = f"line {node.lineno}: expected key = literal, got {ast.unparse(node)!r}"
            raise SystemExit(f"{path}, {got}") from None
        if key == "include":
            included = os.path.join(os.path.dirname(path), str(value))
            yield from read_file(included, (*outer, own))
        else:
            yield path, key, value


def convert(source, key, value, types):
    """Return value as one of types. An int may become a float, and a whole float an int."""
    if type(value) in types:
        return value
    if type(value) is int and float in types:
        return float(value)
    if type(value) is float and int in types and value.is_integer():
        return int(value)
    expected = " or ".join("None" if t is type(None) else t.__name__ for t in types)
    raise SystemExit(f"{source}: {key} expects {expected}, got {value!r} ({type(value).__name__})")


def check(settings, rules, error=SystemExit):
    """Raise an error if a setting has a bad value. None is never one.

    rules: (names of settings, condition on their values, the condition in words)
    """
    for keys, holds, words in rules:
        for key in keys.split():
            if settings[key] is not None and not holds(settings[key]):
                raise error(f"{key}={settings[key]!r}: must be {words}")


def usage(text, argv, fits):
    """For scripts without settings: print the text if asked to, or if the arguments do not fit."""
    asked = bool({"-h", "--help"} & {*argv})
    if asked or not fits or "" in argv:
        print(text.strip(), file=sys.stdout if asked else sys.stderr)
        raise SystemExit(not asked)


def echo(settings):
    """Print the settings whose values are not the defaults."""
    changed = {key: value for key, value in settings.items() if value != defaults[key]}
    text = " ".join(f"{key}={value!r}" for key, value in changed.items()) or "none"
    print(textwrap.fill(f"settings that differ from the defaults: {text}; --help lists all", 120))
