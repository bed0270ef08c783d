"""lm-evaluation-harness scores the server's model as it scores the same model in transformers."""

import random
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch

from pagetable.text import resolve_model
from tests.serving.running import RunningServer, running_server

pytest.importorskip("lm_eval", reason="lm-eval is not installed")

NUM_PAIRS = 36
TEXTS = [" ".join(topics[name].split()) for name in sorted(topics)]
CHAT = "<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n"

pytestmark = pytest.mark.filterwarnings("ignore")  # of lm-eval's and transformers' own


@pytest.fixture(scope="module")
def real_server() -> Iterator[RunningServer]:
    with running_server("smollm2", "--kv-cache-memory", "512MiB") as server:
        yield server
        server.wait_until_idle()


@pytest.fixture(scope="module")
def reference() -> Any:
    """The harness with transformers in float32."""
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = resolve_model("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, device="cpu")


@pytest.fixture(scope="module")
def tokenizer_folder(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The harness needs one of its own beside the server, to know where a context ends."""
    folder = tmp_path_factory.mktemp("tokenizer")
    reference.tokenizer.save_pretrained(folder)
    return folder


def harness(server: RunningServer, tokenizer_folder: Path, **options: Any) -> Any:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    return LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions",
        model="smollm2",
        tokenizer=str(tokenizer_folder),
        tokenizer_backend="huggingface",
        max_retries=1,
        **options,
    )


def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, given, index) for index, given in enumerate(arguments)]


@pytest.fixture(scope="module")
def pairs() -> list[tuple[str, str]]:
    """Contexts and continuations: words of real text, choices as in a multiple-choice task, ends of answers."""
    rng = random.Random(11)
    found = [(CHAT, "Hello! How can I help you today?"), (CHAT, "Hello there")]
    found += [("The capital of France is", city) for city in (" Paris", " London", " a", " Paris.")]
    while len(found) < NUM_PAIRS:
        words = rng.choice(TEXTS).split(" ")
        length, rest = rng.randint(8, 160), rng.randint(1, 6)
        start = rng.randrange(max(1, len(words) - length - rest))
        context, continuation = words[start : start + length], words[start + length :][:rest]
        if continuation:
            found.append((" ".join(context), " " + " ".join(continuation)))
    return found


@pytest.fixture(scope="module")
def expected(reference: Any, pairs: list[tuple[str, str]]) -> list[tuple[float, bool]]:
    return reference.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)


@pytest.mark.parametrize(
    "options",
    [{}, {"batch_size": 8}, {"num_concurrent": 6}, {"tokenized_requests": False}],
    ids=["one by one", "batches", "concurrently", "as text"],
)
def test_log_likelihoods_are_those_of_transformers(real_server, tokenizer_folder, pairs, expected, options):
    found = harness(real_server, tokenizer_folder, **options).loglikelihood(instances("loglikelihood", pairs))
    print("largest difference:", max(abs(a - b) for (a, _), (b, _) in zip(found, expected, strict=True)))
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-4)
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in expected]
    assert {is_greedy for _, is_greedy in expected} == {False, True}


def test_rolling_log_likelihoods_are_those_of_transformers(real_server, tokenizer_folder, reference):
    texts = instances("loglikelihood_rolling", [(text[:900],) for text in TEXTS[:6]])
    found = harness(real_server, tokenizer_folder).loglikelihood_rolling(texts)
    expected = reference.loglikelihood_rolling(texts, disable_tqdm=True)
    assert found == pytest.approx(expected, rel=1e-5)


def test_greedy_texts_are_those_of_transformers(real_server, tokenizer_folder, reference):
    settings = {"until": ["\n\n"], "max_gen_toks": 16, "do_sample": False}
    asked = instances("generate_until", [(text[:300], dict(settings)) for text in TEXTS[:4]])
    found = harness(real_server, tokenizer_folder).generate_until(asked)
    assert found == reference.generate_until(asked, disable_tqdm=True)
