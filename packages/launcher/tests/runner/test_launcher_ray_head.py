"""A Ray head has started when it takes jobs, and ends with the process that started it, however that one ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from slime.launcher.runner.ray_job import RayHead, module_path
from slime.types.errors import Unavailable

# Answers as the dashboard at the first port, and listens as the agent of the node at the second one, if there is one.
SERVER = """
import http.server, socket, sys
agents = [socket.create_server(("127.0.0.1", int(port))) for port in sys.argv[2:]]
class Jobs(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Jobs).serve_forever()
"""
# Starts a head, of which only the program is another one, says its id and its directory, and waits.
DRIVER = f"""
import signal, sys
from slime.launcher.runner.ray_job import RayHead
class Head(RayHead):
    def _command(self, directory):
        super()._command(directory)
        return [sys.executable, "-c", {SERVER!r}, str(self.dashboard_port), str(self._agent_port)]
head = Head(0)
head.start()
print(head._process.pid, head._scratch.path, flush=True)
if sys.argv[1:] == ["stop"]:
    head.stop()
else:
    signal.pause()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: elsewhere a child is not told of its parent's death")
def test_a_killed_process_leaves_no_ray_and_its_directory_goes_with_the_next() -> None:
    words = [sys.executable, "-c", DRIVER]
    environment = os.environ | {"PYTHONPATH": module_path()}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as driver:
        assert driver.stdout is not None
        pid, directory = driver.stdout.readline().split()
        head = psutil.Process(int(pid))
        driver.kill()
    try:
        head.wait(timeout=60)
    finally:
        if head.is_running():
            head.kill()
    following = subprocess.run([*words, "stop"], capture_output=True, text=True, env=environment, timeout=120)
    assert following.returncode == 0, following.stderr
    for left in (directory, following.stdout.split()[1]):
        assert not Path(left).parent.exists()


class HeadWithoutAgent(RayHead):
    def _command(self, directory: Path) -> list[str]:
        super()._command(directory)
        return [sys.executable, "-c", SERVER, str(self.dashboard_port)]


def test_a_head_whose_node_takes_no_jobs_yet_has_not_started() -> None:
    with pytest.raises(Unavailable, match="Ray did not start in 3 s"):
        HeadWithoutAgent(0).start(seconds=3)
