"""Requests that are wrong in ways that no client library makes: an answer that helps, at little cost."""

import json
from collections import Counter
from typing import Any

import httpx
import pydantic
import pytest

from pagetable.serving.schema import ChatCompletionRequest, CompletionRequest, DetokenizeRequest

CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
MANY = 100_000


JSON = {"Content-Type": "application/json"}


def refused(http: httpx.Client, path: str, body: Any) -> dict[str, Any]:
    """What is said about a body, given as bytes or as what is to be made JSON of."""
    content = body if isinstance(body, bytes) else json.dumps(body)
    response = http.post(path, content=content, headers=JSON)
    assert response.status_code == 400, response.text
    return response.json()["error"]


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (CompletionRequest, {"prompt": [-1] * MANY}),
        (CompletionRequest, {"prompt": [[1]] + [1] * MANY}),
        (CompletionRequest, {"prompt": "x", "stop": [5] * MANY}),
        (CompletionRequest, {"logit_bias": dict.fromkeys(map(str, range(MANY)), "x")}),  # and no prompt
        (CompletionRequest, {f"field{i}": 0 for i in range(MANY)}),
        (ChatCompletionRequest, {"messages": [5] * MANY}),
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": [5] * MANY}]}),
        (ChatCompletionRequest, CHAT | {"stop_token_ids": ["x"] * MANY, "tools": [5] * MANY}),
        (DetokenizeRequest, {"tokens": [-1] * MANY}),
    ],
)
def test_many_faults_cost_no_more_than_some(model: type[pydantic.BaseModel], body: dict[str, Any]):
    with pytest.raises(pydantic.ValidationError) as caught:
        model.model_validate(body)
    assert caught.value.error_count() < 200


def test_a_body_of_megabytes_full_of_faults_is_refused(http: httpx.Client):
    error = refused(http, "/v1/completions", {"prompt": [1] * 1_000_000 + [-1]})
    assert (error["message"][:17], error["param"]) == ("prompt.1000000=-1", "prompt")
    error = refused(http, "/v1/completions", {"prompt": "x", "max_tokens": 1, **{f"a{i}": 0 for i in range(MANY)}})
    assert error["message"] == "a0 is not supported; leave it out"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([5, -1], "prompt.1=-1: Input should be greater than or equal to 0"),
        (["a", 5], "prompt.1=5: Input should be a valid string"),
        ([[5], ["a"]], "prompt.1.0='a': Input should be a valid integer"),
        ([], "prompt is an empty list; at least one prompt is needed"),
    ],
)
def test_the_message_is_about_the_element_at_fault(http: httpx.Client, prompt: Any, message: str):
    assert refused(http, "/v1/completions", {"prompt": prompt})["message"] == message


@pytest.mark.parametrize("name", ["foo-bar", "é x", "", "\ud800"])
def test_an_unknown_field_may_have_any_name(http: httpx.Client, name: str):
    error = refused(http, "/v1/completions", {"prompt": "x", name: 1})
    assert error["message"].endswith("is not supported; leave it out") or "\\ud800" in error["message"]


@pytest.mark.parametrize("field", ["prompt", "stop", "cache_salt", "suffix"])
def test_half_of_a_surrogate_pair_is_no_text(http: httpx.Client, field: str):
    assert refused(http, "/v1/completions", {"prompt": "x", field: "\ud800"})["param"] == field


@pytest.mark.parametrize("name", ["messages", "tools", "chat_template", "add_generation_prompt"])
def test_what_a_chat_template_may_not_be_given(http: httpx.Client, name: str):
    error = refused(http, "/v1/chat/completions", CHAT | {"chat_template_kwargs": {name: 1}})
    assert error["message"] == f"chat_template_kwargs may not set {name}"


@pytest.mark.parametrize("name", ["self", "function", "template", "kwargs", "loop", "__class__", ""])
def test_any_other_variable_of_a_chat_template_may_have_any_name(http: httpx.Client, name: str):
    body = CHAT | {"chat_template_kwargs": {name: 1}}
    assert http.post("/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
        ({"stop": ""}, "stop"),
    ],
)
def test_what_the_engine_refuses_names_its_field(http: httpx.Client, fields: dict[str, Any], param: str):
    assert refused(http, "/v1/completions", {"prompt": "x"} | fields)["param"] == param


def test_a_body_that_is_no_json_object(http: httpx.Client):
    form = http.post("/v1/completions", content=b'{"prompt": "x"}').json()
    assert "Content-Type: application/json" in form["error"]["message"]
    assert refused(http, "/v1/completions", [])["message"].startswith("the body=[]: ")
    assert refused(http, "/v1/completions", b"")["message"] == "a JSON body is missing"
    for nested in ("[" * 100_000 + "]" * 100_000, '{"a":' * 970 + "1" + "}" * 970):
        refused(http, "/v1/completions", b'{"prompt": %s}' % nested.encode())


def test_an_echo_without_an_answer_counts_no_token(http: httpx.Client):
    body = {"prompt": "abc", "echo": True, "max_tokens": 0, "temperature": 0}
    (token,) = http.post("/v1/completions", json=body | {"max_tokens": 1, "logprobs": 1}).json()["choices"]
    drawn = token["logprobs"]["tokens"][-1]
    body["stop_token_ids"] = http.post("/tokenize", json={"prompt": drawn}).json()["tokens"]
    answer = http.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["stop_reason"] is None
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_null_is_as_good_as_nothing_where_the_openai_api_has_it(http: httpx.Client, path: str):
    body = {"prompt": "x", "max_tokens": 1} if path == "/v1/completions" else CHAT
    names = "model n temperature top_p seed stop stream stream_options presence_penalty frequency_penalty logit_bias"
    names += " user metadata store service_tier logprobs"
    response = http.post(path, json=body | dict.fromkeys(names.split()))
    assert response.status_code == 200, response.text


def test_the_description_has_no_statuses_and_names_but_its_own(http: httpx.Client):
    description = http.get("/openapi.json").json()
    operations = [operation for methods in description["paths"].values() for operation in methods.values()]
    assert not [operation for operation in operations if "422" in operation["responses"]]
    assert max(Counter(operation["operationId"] for operation in operations).values()) == 1
    assert http.get("/ping").status_code == http.post("/ping").status_code == 200
