"""An agent as a process of its own: `/invocations` and `/ping` over HTTP, two turns with the model of the session.

What it does is said by "task" of the payload: "direct" answers with its result, the others leave one in S3; "error"
fails with 500, "refuse" answers 500 by HTTP, "silent" leaves nothing, "die" ends the process, "idle" asks the model
nothing, "no_reward" and "list" differ in their reward. Its first line of output is its port.
"""

from __future__ import annotations

import json
import os
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SESSION = "X-Amzn-Bedrock-AgentCore-Runtime-Session-Id"


def ask(own: dict[str, Any], messages: list[dict[str, Any]]) -> dict[str, Any]:
    body = {"model": own["model_id"], "messages": messages, "max_tokens": 5, "logprobs": True, "temperature": 0.1}
    request = urllib.request.Request(
        own["base_url"] + "/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def episode(payload: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": str(payload.get("question", "12"))}]
    answers = []
    for follow_up in ("7", "8"):
        answers.append(ask(own, messages))
        messages += [answers[-1]["choices"][0]["message"], {"role": "user", "content": follow_up}]
    return {"status_code": 200, "rewards": payload.get("reward", 1.0), "answers": answers, "payload": payload}


def result_of(payload: dict[str, Any], own: dict[str, Any]) -> dict[str, Any] | None:
    task = payload["task"]
    if task in ("silent", "die"):
        ask(own, [{"role": "user", "content": "1"}])
        if task == "die":
            os._exit(3)
        return None
    if task == "idle":
        return {"status_code": 200, "rewards": 1.0}
    result = episode(payload, own)
    if task == "error":
        result = {"status_code": 500, "stop_reason": "it broke", "rewards": 0.0}
    if task == "no_reward":
        del result["rewards"]
    if task == "list":
        result["rewards"] = [0.0, 0.25]
    return result


def work(payload: dict[str, Any], own: dict[str, Any], key: str) -> None:
    import boto3

    result = result_of(payload, own)
    if result is not None:
        boto3.client("s3").put_object(Bucket=own["s3_bucket"], Key=key, Body=json.dumps(result).encode())


class Agent(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer(200, {"status": "Healthy"})

    def do_POST(self) -> None:
        payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        own = payload["_rollout"]
        if payload["task"] == "refuse":
            self.answer(500, {"error": "not today"})
        elif payload["task"] in ("direct", "idle"):
            self.answer(200, result_of(payload, own))
        else:
            key = f"{own['exp_id']}/{own['input_id']}/{self.headers[SESSION]}.json"
            threading.Thread(target=work, args=(payload, own, key), daemon=True).start()
            self.answer(200, {"status": "processing", "s3_bucket": own["s3_bucket"], "result_key": key})

    def answer(self, status: int, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        return None


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Agent)
    print(server.server_port, flush=True)
    server.serve_forever()
