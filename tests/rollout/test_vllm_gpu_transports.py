"""Transports between GPUs, up to what goes over HTTP: the order of things, and what vLLM's own types make of it."""

from __future__ import annotations

import base64
import contextlib
import json
import pickle
import subprocess
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from served import PYTHON
from sorl_lightning.errors import ConfigurationError, EngineOutage
from sorl_lightning.rollout.vllm.launch import Launch
from sorl_lightning.rollout.vllm.transports import IPCTransport, NCCLTransport
from sorl_lightning.rollout.vllm.transports import ipc as ipc_module
from sorl_lightning.rollout.vllm.transports import nccl as nccl_module

WEIGHTS = [("embedding", torch.arange(6.0).view(2, 3)), ("head", torch.ones(4, dtype=torch.bfloat16))]
UNIQUE_ID = bytes(range(128))


class Wire:
    """Takes note of what is asked of servers and of NCCL, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def post(self, route: str, bodies: Sequence[dict[str, Any] | None]) -> Future[Any]:
        self.events.append((route, json.loads(json.dumps(bodies))))  # it must be JSON
        answer: Future[Any] = Future()
        answer.set_result(None)
        return answer

    def unique_id(self) -> bytes:
        return UNIQUE_ID

    def init_rank(self, world: int, unique_id: bytes, rank: int) -> str:
        self.events.append(("init_rank", (world, unique_id, rank)))
        return "communicator"

    def all_reduce(self, tensors: list[torch.Tensor], comms: list[str]) -> None:
        self.events.append(("all_reduce", (tensors[0].tolist(), comms)))

    def broadcast(self, tensors: list[torch.Tensor], comms: list[str]) -> None:
        self.events.append(("broadcast", (tensors[0].tolist(), comms)))

    def bodies(self, route: str) -> list[Any]:
        return [said for name, said in self.events if name == route]


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    """A machine that seems to have a GPU; its memory is this process's."""
    wire = Wire()
    monkeypatch.setattr(nccl_module, "nccl", wire)
    for module in (nccl_module, ipc_module):
        monkeypatch.setattr(module, "own_gpu", lambda transport: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-1"))
    monkeypatch.setattr(ipc_module, "reduce_tensor", lambda tensor: (None, ("handle", tensor.data_ptr())))
    return wire


def delivered(wire: Wire, transport: Any, workers: Sequence[int]) -> Wire:
    transport.connect(wire.post, workers, 5.0)
    transport.deliver(iter(WEIGHTS), "run:3", wire.post, 2**20)
    transport.close()
    return wire


def test_nccl_announces_and_broadcasts_every_tensor_in_order(wire: Wire) -> None:
    events = delivered(wire, NCCLTransport(), (2, 4)).events
    ((_, meetings),) = [event for event in events if event[0] == "/init_weight_transfer_engine"]
    assert [meeting["init_info"]["rank_offset"] for meeting in meetings] == [
        1,
        3,
    ]  # after the trainer, then the first two
    assert {meeting["init_info"]["world_size"] for meeting in meetings} == {7}
    assert {meeting["init_info"]["nccl_unique_id_b64"] for meeting in meetings} == {
        base64.b64encode(UNIQUE_ID).decode()
    }
    joined = [event for event in events if event[0] in ("init_rank", "all_reduce")]
    assert joined == [("init_rank", (7, UNIQUE_ID, 0)), ("all_reduce", ([0.0], ["communicator"]))]
    assert [said for name, said in events if name == "broadcast"] == [
        (tensor.tolist(), ["communicator"]) for _, tensor in WEIGHTS
    ]
    order = [name for name, _ in events if name.startswith("/")]
    assert order == [
        "/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"
    ]  # fmt: skip
    assert wire.bodies("/finish_weight_update") == [[{"weight_version": "run:3"}]]


def test_servers_that_refuse_are_heard_over_nccl_that_waits_for_them(wire: Wire) -> None:
    def refuse(route: str, bodies: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        answer.set_exception(EngineOutage("worker died"))
        return answer

    with pytest.raises(EngineOutage, match="worker died"):
        NCCLTransport().connect(refuse, (1,), 5.0)


def test_ipc_hands_over_all_tensors_by_the_gpu_that_they_are_on(wire: Wire) -> None:
    delivered(wire, IPCTransport(), (1, 1))
    ((body,),) = wire.bodies("/update_weights")
    handles = pickle.loads(base64.b64decode(body["update_info"]["ipc_handles_pickled"]))
    assert handles == [{"GPU-1": ("handle", tensor.data_ptr())} for _, tensor in WEIGHTS]  # the tensors themselves
    with pytest.raises(ConfigurationError, match=r"servers of one worker.*\[1, 2\]: use NCCLTransport"):
        IPCTransport().connect(wire.post, (1, 2), 5.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("transport", [NCCLTransport(), IPCTransport()])
def test_a_trainer_without_a_gpu_is_refused(transport: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"transport={type(transport).__name__} sends weights from a GPU"):
        transport.connect(Wire().post, (1,), 5.0)


def test_a_server_that_opens_handles_is_allowed_to() -> None:
    settings = {"folder": Path(), "port": 1, "model": "policy", "dtype": "bfloat16", "context": 64, "cpu": False}
    allowed = "VLLM_ALLOW_INSECURE_SERIALIZATION"
    assert Launch(backend="ipc", **settings).variables()[allowed] == "1"  # type: ignore[arg-type]
    assert allowed not in Launch(backend="nccl", **settings).variables()  # type: ignore[arg-type]


CHECK = """
import json, sys
from sorl_lightning.vllm_plugin import serve
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferInitInfo, IPCWeightTransferUpdateInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferInitInfo, NCCLWeightTransferUpdateInfo
said = json.load(sys.stdin)
NCCLWeightTransferUpdateInfo(**said["nccl_update"])
IPCWeightTransferInitInfo(**said["ipc_init"])
unique_id = [NCCLWeightTransferInitInfo(**init).nccl_unique_id_bytes.hex() for init in said["nccl_init"]]
print(json.dumps([unique_id, IPCWeightTransferUpdateInfo(**said["ipc_update"]).ipc_handles]))
"""


@pytest.mark.vllm
def test_vllms_own_types_take_what_is_said(wire: Wire, tmp_path: Path) -> None:
    broadcast, opened = Wire(), Wire()
    wire.post = broadcast.post  # type: ignore[method-assign]
    delivered(wire, NCCLTransport(), (2, 4))
    wire.post = opened.post  # type: ignore[method-assign]
    delivered(wire, IPCTransport(), (1,))
    (nccl_init,), ((nccl_update,),) = (
        broadcast.bodies("/init_weight_transfer_engine"),
        broadcast.bodies("/update_weights"),
    )
    ((ipc_init,),), ((ipc_update,),) = opened.bodies("/init_weight_transfer_engine"), opened.bodies("/update_weights")
    said = {
        "nccl_init": [body["init_info"] for body in nccl_init], "nccl_update": nccl_update["update_info"],
        "ipc_init": ipc_init["init_info"], "ipc_update": ipc_update["update_info"],
    }  # fmt: skip
    launch = Launch(folder=tmp_path, port=1, model="policy", backend="ipc", dtype="float32", context=64, cpu=True)
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sorl_lightning").symlink_to(Path(nccl_module.__file__).parents[3])
    vllm = subprocess.run(
        [PYTHON, "-c", CHECK], input=json.dumps(said), capture_output=True, text=True, env=launch.variables()
    )
    assert vllm.returncode == 0, vllm.stderr
    unique_ids, handles = json.loads(vllm.stdout.splitlines()[-1])
    assert unique_ids == [UNIQUE_ID.hex()] * 2
    assert handles == [{"GPU-1": ["handle", tensor.data_ptr()]} for _, tensor in WEIGHTS]
