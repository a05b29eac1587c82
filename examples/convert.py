"""Convert a checkpoint from Python, read the report, and run the result: python examples/convert.py MODEL BUNDLE."""

import sys
from pathlib import Path

from inferencex.convert.pipeline import ConvertOptions, convert
from inferencex.convert.quantize import parse_scheme
from inferencex.runtime import LLM, SamplingParams


class Printer:
    """Shows how the conversion gets on."""

    def stage(self, name: str) -> None:
        print(f"{name} ...")

    def advance(self, done: int, total: int, what: str) -> None:
        pass

    def note(self, text: str) -> None:
        print(f"  {text}")


def main(model: str, bundle: str) -> None:
    scheme = parse_scheme("rtn-int4", group_size=32, exclude=["*down_proj*"])
    report = convert(ConvertOptions(model_id=model, output=Path(bundle), scheme=scheme), Printer())
    print(report.to_markdown())
    (output,) = LLM(bundle).generate("Once upon a time", SamplingParams(temperature=0.0, max_tokens=16))
    print(output.outputs[0].text)


if __name__ == "__main__":
    main(*sys.argv[1:3])
