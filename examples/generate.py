"""Complete several prompts at once and show what each cost: python examples/generate.py BUNDLE."""

import sys

from inferencex.runtime import LLM, SamplingParams

PROMPTS = ["Once upon a time", "The best way to learn a language is", "1, 2, 3, 4,"]


def main(bundle: str) -> None:
    llm = LLM(bundle)
    params = SamplingParams(temperature=0.0, max_tokens=24, logprobs=0)
    for output in llm.generate(PROMPTS, params):
        completion = output.outputs[0]
        print(f"{output.prompt!r} -> {completion.text!r}")
        print(f"  {len(completion.token_ids)} tokens, finished by {completion.finish_reason}")
    print(llm.stats)


if __name__ == "__main__":
    main(sys.argv[1])
