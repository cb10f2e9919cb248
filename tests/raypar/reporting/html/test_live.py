"""``raypar report RUN --live``: one page on 127.0.0.1, made anew at every request, until Ctrl-C."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from base64 import b64encode
from contextlib import contextmanager
from hashlib import sha256
from threading import Thread

import pytest

from raypar.cli import run_folder
from raypar.cli.main import run_command
from raypar.errors import ConfigError
from raypar.reporting.html.live import EVERY, Live
from raypar.reporting.html.markup import script
from raypar.reporting.html.page import page
from raypar.reporting.run_folder.append import Lines
from raypar.reporting.run_folder.read import read
from tests.raypar.reporting.html.test_compare import written
from tests.raypar.reporting.html.test_report import report


@contextmanager
def serving(live):
    thread = Thread(target=live.serve)
    thread.start()
    try:
        yield int(live.url.rstrip("/").rpartition(":")[2])
    finally:
        live.stop()
        thread.join(timeout=10)
        assert not thread.is_alive()


def served(made):
    return serving(Live(made, 0))


def asked(port, path="/", method="GET", host=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, headers={"Host": host or f"127.0.0.1:{port}"})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer, text


def test_only_the_page_is_served_and_only_to_who_asks_for_this_machine():
    with served(lambda: "<p>here</p>") as port:
        answer, text = asked(port)
        assert (answer.status, text) == (200, "<p>here</p>")
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
        ours = b64encode(sha256(script().encode()).digest()).decode()
        assert answer.headers["Content-Security-Policy"].endswith(f"script-src 'sha256-{ours}'"), "no other script runs"
        assert asked(port, method="HEAD")[1] == ""
        for path in ("/run.toml", "/../../etc/passwd", "/?a", "/favicon.ico"):
            assert asked(port, path)[0].status == 404
        assert asked(port, method="POST")[0].status == 501
        assert asked(port, host="evil.example")[0].status == 403
        assert asked(port, host=f"localhost:{port}")[0].status == 200


def test_it_listens_on_this_machine_alone():
    with served(lambda: "") as port, socket.socket() as probe:
        probe.settimeout(2)
        with pytest.raises(OSError):
            probe.connect(("127.0.0.2", port))


def test_a_connection_that_says_nothing_does_not_stop_the_others():
    with served(lambda: "here") as port, socket.create_connection(("127.0.0.1", port)):
        assert asked(port)[1] == "here"


def test_a_port_that_is_taken_is_a_mistake_with_its_fix(tmp_path, capsys):
    folder = written(tmp_path / "run")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert run_command(["report", str(folder), "--live", "--port", str(port)]) == 2
    assert f"port {port} of 127.0.0.1 is taken: give another --port, or 0 for any" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="from 0 to 65535"):
        Live(lambda: "", 70_000)


def test_flags_that_do_not_go_together_are_mistakes(tmp_path, capsys):
    folder = str(written(tmp_path / "run"))
    assert run_command(["report", folder, "--live", "--out", "a.html", "--peak", "-1"]) == 2
    assert run_command(["report", folder, "--port", "1234"]) == 2
    told = capsys.readouterr().err
    for why in ("leave --out away", "add --live", "such as 312e12"):
        assert why in told


def test_a_page_refreshes_while_the_run_goes_on_and_says_when_it_has_ended(tmp_path):
    folder = written(tmp_path / "run")
    lines = Lines(folder / "log.txt")
    lines.lock()
    going = page(read(folder), every=EVERY)
    assert f'<meta http-equiv="refresh" content="{EVERY}">' in going
    assert f"The run goes on; this page loads itself every {EVERY} seconds." in going
    assert "http-equiv" not in page(read(folder)), "a file never changes"
    lines.close()
    over = page(read(folder), every=EVERY)
    assert "http-equiv" not in over
    assert "The run has ended; this page does not refresh any more." in over


def test_a_run_that_is_being_launched_has_a_page_that_says_so(tmp_path):
    lines = Lines(tmp_path / "log.txt")
    lines.lock()
    live = run_folder.report(run_folder.ReportArgs((tmp_path,), live=True, port=0))
    with serving(live) as port:
        assert f"The run has not taken a step yet; this page loads itself every {EVERY} seconds." in asked(port)[1]
        lines.close()  # the launch has failed
        assert "it has no run.toml" in asked(port)[1]


def test_a_run_that_ended_early_says_how_beside_its_steps(tmp_path):
    folder = written(tmp_path / "run")
    (folder / "metrics.jsonl").write_text(json.dumps(report(0)) + "\n")
    assert "The run ended after step 1, before its last step." in page(read(folder))
    (folder / "log.txt").write_text("2026-01-01T00:00:00+0000 INFO Ctrl-C: ending\n")
    assert "The run stopped with Ctrl-C after step 1." in page(read(folder))


def test_the_command_serves_until_ctrl_c_and_every_request_reads_the_folder(tmp_path):
    folder = written(tmp_path / "run")
    words = [sys.executable, "-m", "raypar.cli.main", "report", str(folder), "--live", "--port", "0"]
    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as command:
        assert command.stdout is not None
        port = int(re.search(r"http://127\.0\.0\.1:(\d+)/", command.stdout.readline())[1])
        assert "4 of 4" in asked(port)[1]
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(report(4)) + "\n")
        assert "5 of 4" in asked(port)[1]
        (folder / "metrics.jsonl").write_text("[\n")
        assert "Could not be read" in asked(port)[1]
        command.send_signal(signal.SIGINT)
        out, err = command.communicate(timeout=30)
    assert (command.returncode, out, err) == (0, "the page is not served any more\n", "")
