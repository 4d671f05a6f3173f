"""Files that travel with the package: named configurations, model folders, evaluation tasks.

A wheel carries ``configs/`` inside the package; an editable install or a source checkout has it
one level up. Both functions look in the package first, then in the checkout, and return real
paths, because checkpoints are memory-mapped.
"""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def config_folder() -> Path:
    """The folder of named configurations, packaged or of the source checkout.

    Raises FileNotFoundError when neither exists (a damaged installation).
    """
    packaged = PACKAGE / "configs"
    if packaged.is_dir():
        return packaged
    checkout = PACKAGE.parent
    if (checkout / "pyproject.toml").is_file() and (checkout / "configs").is_dir():
        return checkout / "configs"
    raise FileNotFoundError(
        f"no configs folder in {PACKAGE} and no source checkout around it; "
        "reinstall deepinfer-jax from a wheel or work from a complete clone"
    )


def config_names() -> tuple[str, ...]:
    """Names that `config_file` knows, sorted."""
    folder = config_folder()
    single = {path.stem for path in folder.glob("*.json")}
    nested = {path.parent.name for path in folder.glob("*/config.json")}
    return tuple(sorted(single | nested))


def config_file(name: str) -> Path:
    """Path of the ``config.json`` called `name`: ``NAME/config.json`` or ``NAME.json``.

    Raises ValueError that lists the known names when there is no such configuration.
    """
    names = config_names()
    if name not in names:
        raise ValueError(f"unknown configuration {name!r}; known: {', '.join(names)}")
    nested = config_folder() / name / "config.json"
    return nested if nested.is_file() else config_folder() / f"{name}.json"


def table_names(kind: str) -> tuple[str, ...]:
    """Names that `table_file` knows of a kind ("hardware", "meshes"), sorted."""
    return tuple(sorted(path.stem for path in (config_folder() / kind).glob("*.json")))


def table_file(kind: str, what: str, name: str | Path) -> Path:
    """The file of the `what` called `name` in ``configs/KIND``, or the JSON file that it names.

    Raises ValueError that lists the known names when there is neither.
    """
    known = table_names(kind)
    if name in known:
        return config_folder() / kind / f"{name}.json"
    if Path(name).is_file():
        return Path(name)
    raise ValueError(
        f"unknown {what} {str(name)!r}: give one of {', '.join(known)}, or a JSON file like those "
        f"in configs/{kind}"
    )


def model_names() -> tuple[str, ...]:
    """Names of the model folders shipped under ``deepinfer_jax/assets``, sorted."""
    found = (PACKAGE / "assets").glob("*/config.json")
    return tuple(sorted(path.parent.name for path in found))


def model_folder(name: str) -> Path:
    """Folder of the shipped model `name`: shards, index, ``config.json``, tokenizer.

    Raises ValueError that lists the shipped names when there is no such model.
    """
    names = model_names()
    if name not in names:
        raise ValueError(f"unknown shipped model {name!r}; shipped: {', '.join(names) or 'none'}")
    return PACKAGE / "assets" / name


def task_names() -> tuple[str, ...]:
    """Names of the evaluation tasks shipped under ``deepinfer_jax/assets/tasks``, sorted."""
    return tuple(sorted(path.stem for path in (PACKAGE / "assets" / "tasks").glob("*.jsonl")))


def task_file(name: str) -> Path:
    """Path of the shipped task `name`.

    Raises ValueError that lists the shipped names when there is no such task.
    """
    names = task_names()
    if name not in names:
        raise ValueError(f"unknown task {name!r}; shipped: {', '.join(names) or 'none'}")
    return PACKAGE / "assets" / "tasks" / f"{name}.jsonl"
