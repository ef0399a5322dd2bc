"""What bench.call compares with, each a process of its own: `python -m bench.references echo|canned ARGUMENT`.

echo FOLDER: a ZeroMQ ROUTER that makes each batch of messages durable in a file, then echoes it. Prints its address.
canned CONFIG: an HTTP server that has the answer to each request of a sampling SDK client ready. Prints its port.
Both end with their stdin.
"""

import asyncio
import json
import os
import sys
import tempfile
import threading

import msgspec
import uvicorn
import uvloop
import zmq
from tinker.proto import tinker_public_pb2 as pb


def echo(folder: str) -> None:
    """Serve until killed."""
    fd, path = tempfile.mkstemp(dir=folder)
    os.unlink(path)
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind("tcp://127.0.0.1:*")
    print(socket.last_endpoint.decode(), flush=True)
    while True:
        batch = [socket.recv_multipart()]
        while socket.poll(0):
            batch.append(socket.recv_multipart())
        os.write(fd, b"".join(frames[-1] for frames in batch))
        os.fdatasync(fd)
        for frames in batch:
            socket.send_multipart(frames)


def canned(config: str) -> None:
    """Serve until killed. config: the pool's own answer to client/config."""
    drawn = pb.SampleResponse()
    drawn.sequences.add(stop_reason=pb.STOP_REASON_LENGTH, tokens=bytes(4), logprobs=bytes(4))
    sample = drawn.SerializeToString()
    answers: dict[str, object] = {
        "client/config": json.loads(config),
        "client/dynamic_config": {},
        "create_session": {"type": "create_session", "session_id": "s"},
        "create_sampling_session": {"type": "create_sampling_session", "sampling_session_id": "s:sample:0"},
        "session_heartbeat": {"type": "session_heartbeat"},
        "asample": {"request_id": "s:sample:0:0", "sample_sequence_ids": ["s:sample:0:0:0"]},
    }
    bodies = {f"/api/v1/{path}": msgspec.json.encode(answer) for path, answer in answers.items()}

    async def app(scope: dict, receive, send) -> None:
        while (await receive()).get("more_body"):
            pass
        body = bodies.get(scope["path"])
        kind = b"application/x-protobuf" if body is None else b"application/json"
        body = sample if body is None else body
        headers = [(b"content-type", kind), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def serve() -> None:
        server = uvicorn.Server(
            uvicorn.Config(app, port=0, http="httptools", loop="none", lifespan="off", log_config=None)
        )
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        print(server.servers[0].sockets[0].getsockname()[1], flush=True)
        await serving

    uvloop.run(serve())


def _end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    {"echo": echo, "canned": canned}[sys.argv[1]](sys.argv[2])
