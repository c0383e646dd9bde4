"""A client that knows nothing but the address: it learns the service from reflection and calls it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.integration.serving import Serving, serving


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Serving]:
    with serving(tiny_model) as running:
        yield running


def test_all_services_are_listed(server: Serving) -> None:
    with grpc.insecure_channel(server.target) as channel:
        listed = set(ProtoReflectionDescriptorDatabase(channel).get_services())
    assert {"colibri.v1.Inference", "colibri.v1.Experts", "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} <= listed


def test_generate_works_from_reflection_alone(server: Serving) -> None:
    with grpc.insecure_channel(server.target) as channel:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        method = pool.FindServiceByName("colibri.v1.Inference").FindMethodByName("Generate")
        ask = message_factory.GetMessageClass(method.input_type)
        answer = message_factory.GetMessageClass(method.output_type)
        request = ask(text="Hello", max_tokens=7)
        request.sampling.seed = 11
        request.stop.ignore_eos = True
        call = channel.unary_stream(
            "/colibri.v1.Inference/Generate", request_serializer=ask.SerializeToString, response_deserializer=answer.FromString
        )
        events = list(call(request, timeout=30))
    tokens = [token for event in events for token in event.delta.token_ids]
    finish = events[-1].finish
    assert len(tokens) == finish.usage.completion_tokens == 7
    assert method.output_type.fields_by_name["finish"].message_type.fields_by_name["reason"].enum_type.values[finish.reason].name == (
        "FINISH_REASON_LENGTH"
    )


def test_every_field_and_method_can_be_described(server: Serving) -> None:
    with grpc.insecure_channel(server.target) as channel:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        service = pool.FindServiceByName("colibri.v1.Inference")
        assert [method.name for method in service.methods] == ["Generate", "Score", "Tokenize", "Detokenize", "GetModel", "ListModels"]
        experts = pool.FindServiceByName("colibri.v1.Experts")
        assert [method.name for method in experts.methods] == ["Route", "Forward", "Execute"]
        assert experts.methods[0].input_type.fields_by_name["routing"].message_type.full_name == "colibri.v1.RoutingPolicy"
