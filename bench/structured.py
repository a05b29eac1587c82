"""What structured output costs: compiling schemas, masks and choices a token, and generation with a model.

    python -m bench.structured --bundle DIR [--schemas FILE] [--sequences 32] [--seed 0]

The first table walks through each schema's outputs at random, without a model, with the bundle's tokenizer. The second
one has the model write an output for every schema, then as many tokens of anything for the same prompts: equal batches,
with grammars and without. Outputs are validated with the package jsonschema. Times of the first table are those of the
thread, which others on the machine do not change much; times of the second one are what a user waits.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from inferencex.runtime import LLM, Grammar, RequestOutput, SamplingParams
from inferencex.runtime.engine.constraint import TokenMasks, allowed_tokens, mask_width
from inferencex.runtime.engine.sampler import SequenceSampler, choose_tokens
from inferencex.runtime.structured import GrammarCompiler

SCHEMAS = Path(__file__).parents[1] / "tests/runtime/structured/schemas.json"
MOST_TOKENS = 400  # of a walk
MOST_OUTPUT = 1500
SAMPLED = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=0)


@dataclass
class Seconds:
    """What was measured, an entry for each schema or each token."""

    compile: list[float] = field(default_factory=list)
    start: list[float] = field(default_factory=list)
    mask: list[float] = field(default_factory=list)
    accept: list[float] = field(default_factory=list)
    choose: list[float] = field(default_factory=list)
    choose_freely: list[float] = field(default_factory=list)


def walk(compiler: GrammarCompiler, grammar: Grammar, vocab_size: int, seed: int, seconds: Seconds) -> None:
    """Take tokens at random from those that are allowed, until nothing follows."""
    random = np.random.default_rng(seed)
    began = time.thread_time()
    make = compiler.compile(grammar)
    compiled = time.thread_time()
    constraint = make()
    seconds.start.append(time.thread_time() - compiled)
    seconds.compile.append(compiled - began)
    sampler = SequenceSampler(replace(SAMPLED, seed=seed), 0, (), ())
    words = np.empty((1, mask_width(vocab_size)), dtype=np.int32)
    masks = TokenMasks(words, [0])
    for _ in range(MOST_TOKENS):
        logits = random.standard_normal((1, vocab_size), dtype=np.float32)
        at = [time.thread_time()]
        constraint.fill_mask(words[0])
        at.append(time.thread_time())
        if not allowed_tokens(words[0], vocab_size).any():
            break
        at.append(time.thread_time())
        [token] = choose_tokens(logits, [0], [sampler], masks)
        at.append(time.thread_time())
        choose_tokens(logits, [0], [sampler])
        at.append(time.thread_time())
        seconds.mask.append(at[1] - at[0])
        seconds.choose.append(at[3] - at[2])
        seconds.choose_freely.append(at[4] - at[3])
        if token is None or (constraint.may_stop and random.random() < 0.5):
            break
        began = time.thread_time()
        constraint.accept(token)
        seconds.accept.append(time.thread_time() - began)
        if constraint.finished:
            break


def print_costs(seconds: Seconds) -> None:
    """Print a line for each kind of work."""
    print(f"{'':28} {'median':>9} {'mean':>9} {'p99':>9}   microseconds")
    for name, values in (
        ("compile a schema", seconds.compile),
        ("start a sequence", seconds.start),
        ("mask, a token", seconds.mask),
        ("accept, a token", seconds.accept),
        ("choose under the mask", seconds.choose),
        ("choose without a mask", seconds.choose_freely),
    ):
        micros = 1e6 * np.array(values)
        print(f"{name:28} {np.median(micros):9.1f} {micros.mean():9.1f} {np.percentile(micros, 99):9.1f}")


def is_valid(schema: Mapping[str, Any], output: RequestOutput) -> bool:
    """Tell whether an output ended by itself and fits its schema."""
    [completion] = output.outputs
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        return completion.finish_reason == "stop" and validator(schema).is_valid(json.loads(completion.text))
    except ValueError:
        return False


def print_generation(llm: LLM, schemas: Mapping[str, Mapping[str, Any]], seed: int) -> None:
    """Generate with grammars, then as much without, and print both."""
    prompts = [f"An example of {name.replace('_', ' ')} as JSON:\n" for name in schemas]
    params = replace(SAMPLED, seed=seed, max_tokens=MOST_OUTPUT)
    grammars = [Grammar.json_schema(schema) for schema in schemas.values()]
    llm.generate(prompts[:1], replace(params, max_tokens=4), grammar=grammars[:1])  # what only the first one pays
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, grammar=grammars)
    constrained = time.perf_counter() - began
    counts = [len(output.outputs[0].token_ids) for output in outputs]
    free = [replace(params, max_tokens=count, ignore_eos=True) for count in counts]
    began = time.perf_counter()
    llm.generate(prompts, free)
    unconstrained = time.perf_counter() - began
    invalid = [
        name for (name, schema), output in zip(schemas.items(), outputs, strict=True) if not is_valid(schema, output)
    ]
    total = sum(counts)
    print(f"{len(schemas) - len(invalid)} of {len(schemas)} outputs are valid")
    if invalid:
        print(f"not valid: {', '.join(invalid)}")
    print(f"{total} tokens, of at most {llm.engine.options.max_num_seqs} sequences at once")
    for name, taken in (("with grammars", constrained), ("without", unconstrained)):
        print(f"{name:28} {total / taken:9.1f} tokens a second, {1e6 * taken / total:9.1f} microseconds a token")
    print(f"{'difference':28} {1e6 * (constrained - unconstrained) / total:9.1f} microseconds a token")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--schemas", type=Path, default=SCHEMAS)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    schemas = json.loads(options.schemas.read_text(encoding="utf-8"))
    with LLM(options.bundle, max_num_seqs=options.sequences) as llm:
        vocab_size = llm.engine.limits.vocab_size
        began = time.perf_counter()
        llm.grammars.load()
        print(f"the tokenizer of {vocab_size} tokens was loaded in {time.perf_counter() - began:.2f} s")
        seconds = Seconds()
        for place, schema in enumerate(schemas.values()):
            walk(llm.grammars, Grammar.json_schema(schema), vocab_size, options.seed + place, seconds)
        print_costs(seconds)
        print_generation(llm, schemas, options.seed)


if __name__ == "__main__":
    main()
