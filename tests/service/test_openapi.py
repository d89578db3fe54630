"""schemathesis against our own OpenAPI document: what is documented is what happens."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import load_all_checks
from schemathesis.config import SchemathesisConfig

from service.app import create_app
from tests.service.echo import BOTH, CONFIG, EchoEngine, Server
from tests.service.served import HTTP

load_all_checks()
_APP = create_app(CONFIG, EchoEngine(BOTH))
schema = schemathesis.openapi.from_dict(_APP.openapi(), config=SchemathesisConfig())
# Requests that fit the schema are still refused for what no schema can say (shapes that must agree
# with the layer, values in the binary part).
EXCLUDED = [
    check
    for check in schemathesis.checks.CHECKS.get_all()
    if check.__name__ in ("positive_data_acceptance", "negative_data_rejection")
]


@pytest.fixture(scope="module")
def base_url():
    with Server(CONFIG, EchoEngine(BOTH)) as running:
        yield running.url


@schema.parametrize()
@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
    derandomize=True,
)
def test_every_operation_behaves_as_documented(case, base_url):
    case.call_and_validate(base_url=base_url, excluded_checks=EXCLUDED)


def test_the_document_names_every_status_and_one_error_shape():
    document = _APP.openapi()
    infer = document["paths"]["/v2/models/{model}/infer"]["post"]
    assert set(infer["responses"]) >= {
        "200", "400", "401", "403", "404", "408", "409", "413", "415", "422", "429", "500", "503",
    }  # fmt: skip
    for path, operations in document["paths"].items():
        for operation in operations.values():
            for status, answer in operation["responses"].items():
                if status >= "400":
                    content = answer["content"]["application/json"]["schema"]
                    assert content == {"$ref": "#/components/schemas/ErrorBody"}, (path, status)
    error = document["components"]["schemas"]["ErrorBody"]
    assert error["required"] == ["error"]
    assert "HTTPValidationError" not in document["components"]["schemas"]


def test_a_valid_json_request_of_the_schema_passes(base_url):
    """FP8 activations as JSON, as a person with curl might send them."""
    body = {
        "inputs": [
            {"name": "hidden_states", "shape": [1, 256], "datatype": "UINT8", "data": [7] * 256},
            {"name": "hidden_scales", "shape": [1, 2], "datatype": "FP32", "data": [[0.5, 0.25]]},
        ],
        "outputs": [{"name": "topk_ids"}, {"name": "timings"}],
    }
    answer = HTTP.post(base_url + "/v2/models/moe/infer", json=body)
    assert answer.status_code == 200, answer.text
    outputs = {o["name"]: o for o in answer.json()["outputs"]}
    assert outputs["topk_ids"]["datatype"] == "INT32"
    assert len(outputs["timings"]["data"]) == 3
