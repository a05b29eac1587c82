"""What a pipeline's YAML file may say."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
OptionValue = bool | int | float | str | list[str]
Of = Annotated[
    list[str] | None,
    Field(description="Names of conversions, or patterns such as 'int4-*'. Default: all of them."),
]


class Part(BaseModel):
    """A part of a recipe: nothing unknown, nothing converted from another type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Source(Part):
    """The checkpoint that everything is made of."""

    model: Annotated[str, Field(min_length=1, description="What inferencex convert takes as --model-id.")]
    revision: Annotated[str | None, Field(description="Branch, tag or commit on the hub.")] = None
    trust_remote_code: Annotated[bool, Field(description="Run Python code that comes with the checkpoint.")] = False
    allow_pickle: Annotated[bool, Field(description="Read .bin weights.")] = False
    random_weights: Annotated[bool, Field(description="Make weights up from the config alone.")] = False
    seed: Annotated[int | None, Field(description="Seed of random_weights.")] = None


class Conversion(Part):
    """One bundle, or with `matrix` one for every combination of its values."""

    name: Name
    options: Annotated[
        dict[str, OptionValue], Field(description="Options of inferencex convert, without the dashes in front.")
    ] = {}
    matrix: Annotated[
        dict[str, Annotated[list[bool | int | float | str], Field(min_length=1)]],
        Field(description="Options with several values; a bundle is named NAME-VALUE-VALUE."),
    ] = {}


class Gate(Part):
    """An evaluation that a bundle has to pass before it is exported or published."""

    name: Name
    recipe: Annotated[str, Field(min_length=1, description="Evaluation recipe, relative to this file.")]
    of: Of = None
    baseline: Annotated[
        str | None,
        Field(description="What bundles are compared with: source, the name of a conversion, or results or a bundle."),
    ] = None
    limit: Annotated[int | None, Field(ge=1, description="Examples of each task, to try a recipe out.")] = None
    options: Annotated[
        dict[str, OptionValue], Field(description="More options of inferencex eval, without the dashes in front.")
    ] = {}


class Export(Part):
    """A bundle in the format of another tool."""

    format: Annotated[str, Field(description="A format of inferencex export.")]
    of: Of = None


class Publication(Part):
    """Where a bundle, or an export of it, is put once its gates are passed."""

    to: Annotated[
        str,
        Field(
            min_length=1,
            description="A folder, hf://OWNER/NAME[@BRANCH], or a URL of fsspec such as s3://bucket/{name}; {name} is "
            "the conversion and {recipe} this recipe.",
        ),
    ]
    of: Of = None
    artifact: Annotated[str, Field(description="bundle, or a format among the exports.")] = "bundle"
    sign: Annotated[
        str | None,
        Field(description="File of a secret key without a password, to sign SHA256SUMS with; $NAME is filled in."),
    ] = None


class Pipeline(Part):
    """A recipe: one source, bundles of it, what they must pass, and where they go."""

    name: Name
    description: str = ""
    source: Source
    conversions: Annotated[list[Conversion], Field(min_length=1)]
    gates: list[Gate] = []
    exports: list[Export] = []
    publish: list[Publication] = []
