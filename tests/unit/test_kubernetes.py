"""Tests of k8s: manifests that every cluster takes, and wrong words answered in one line."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from isobatch.core.errors import (
    BUG,
    DONE,
    FAILED,
    STOPPED,
    WRONG_INPUT,
    DiskFullError,
    UserError,
    WorkerLostError,
)
from isobatch.core.recipe import Recipe
from isobatch.engine import consent
from isobatch.engine.registry import TASKS
from isobatch.engine.runs.run_folder import RunFolder, Verdict
from isobatch.launch.clusters.kubernetes import job
from isobatch.launch.clusters.kubernetes.job import exit_code, pod, submit
from isobatch.launch.local.arguments import known_flags, parse_request, request_text
from isobatch.tests.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

LEAST = ["--image", "registry/isobatch:1", "--claim", "shared"]
GPUS = ["--task", "causal-lm", "--data", "/isobatch/texts", *LEAST, "--nodes", "4", "--gpus-per-node", "8"]
MINE = f"{ROOT / 'examples' / 'own_task' / 'mine.py'}:Mine"
VERSIONS = ("1.29", "1.34")


def manifest(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Kind -> document."""
    assert submit(words) == 0
    return {one["kind"]: one for one in yaml.safe_load_all(capsys.readouterr().out)}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "words",
    [
        [*GPUS, "--name", "week"],
        [*GPUS, "--mem", "64Gi", "--cpus", "8", "--node-selector", "gpu=h100", "--secret", "hub"],
        ["--task", MINE, *LEAST, "--cpu"],
    ],
    ids=["gpus", "all flags", "own task"],
)
def test_a_manifest_is_what_kubernetes_takes(
    words: list[str], version: str, capsys: pytest.CaptureFixture[str]
) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    found = manifest(capsys, *words)
    assert set(found) == {"ConfigMap", "Service", "Job"}
    for document in found.values():
        validator.validate(document, version, strict=True)
    found["Job"]["spec"]["template"]["spec"]["containers"][0]["limits"] = {}
    with pytest.raises(validator.ValidationError):
        validator.validate(found["Job"], version, strict=True)


def test_pods_find_each_other_and_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    found = manifest(capsys, *GPUS, "--name", "week", "--lr", "3e-4")
    spec = found["Job"]["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 4, 4)
    ends = {rule["action"]: rule["onExitCodes"]["values"] for rule in spec["podFailurePolicy"]["rules"][:2]}
    assert ends == {"FailJob": [WRONG_INPUT, FAILED], "Ignore": [STOPPED]}, "another start mends nothing"
    pod = spec["template"]["spec"]
    assert pod["subdomain"] == found["Service"]["metadata"]["name"] == "week"
    assert found["Service"]["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    (container,) = pod["containers"]
    limits = {"cpu": "64", "memory": "256Gi", "nvidia.com/gpu": "8"}
    assert container["resources"] == {"limits": limits, "requests": limits}
    assert {"--nnodes=4", "--nproc-per-node=8", "--master-addr=week-0.week"} < set(container["command"])
    recipe = yaml.safe_load(found["ConfigMap"]["data"]["recipe.yaml"])
    assert (recipe["task"], recipe["data"], float(recipe["lr"])) == ("causal-lm", "/isobatch/texts", 3e-4)


def test_the_plan_that_a_manifest_names_is_of_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(["--task", "causal-lm", *LEAST, "--cpu", "--mem", "8Gi"]) == 0
    assert re.search(
        "(?m)^# The plan of cpu:4x8gb .*\n# memory     fits: .* of 8.59 GB", capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("words", "machine"),
    [(["--node-selector", "gpu=t4"], "4x8xt4"), (["--hardware", "l4"], "4x8xl4"), ([], "4x8xh100")],
)
def test_six_lines_of_the_plan_stand_above_a_manifest(
    words: list[str], machine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit([*GPUS, *words]) == 0
    head, *lines = capsys.readouterr().out.splitlines()[:7]
    assert head.startswith(f"# The plan of {machine} (--hardware names the card)")
    six = ["memory", "devices", "time", "cost", "batch", "exactness"]
    assert [line.split()[1] for line in lines] == six


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--hardware", "h1000"], "--hardware 4x8xh1000: did you mean"),
        (["--model", "HERE"], "--model HERE: holds no config.json"),
        (["--data", "HERE"], "--data HERE"),
    ],
)
def test_what_auto_would_refuse_here_is_refused_where_a_manifest_is_printed(
    words: list[str], says: str, tmp_path: Path
) -> None:
    asked = ["--task", "causal-lm", *LEAST, "--nodes", "4", "--gpus-per-node", "8"]
    with pytest.raises(UserError, match=says.replace("HERE", str(tmp_path))):
        submit([*asked, *(word.replace("HERE", str(tmp_path)) for word in words)])


def test_an_own_tasks_files_go_along(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = shutil.copytree(ROOT / "examples" / "own_task", tmp_path / "own")
    (own / "parts").mkdir()
    (own / "parts" / "__init__.py").write_text("")
    (own / "parts" / "more.py").write_text("WIDTH = 3\n")
    (own / "mine.py").write_text((own / "mine.py").read_text() + "\nimport parts.more\n")
    found = manifest(capsys, "--task", f"{own}/mine.py:Mine", *LEAST, "--cpu", "--name", "mine")
    assert {"data.py", "models.py", "mine.py", "recipe.yaml"} < found["ConfigMap"]["data"].keys()
    assert found["ConfigMap"]["data"]["parts..more.py"] == "WIDTH = 3\n"
    (volume,) = [v for v in found["Job"]["spec"]["template"]["spec"]["volumes"] if "configMap" in v]
    assert {"key": "parts..more.py", "path": "parts/more.py"} in volume["configMap"]["items"]
    assert yaml.safe_load(found["ConfigMap"]["data"]["recipe.yaml"])["task"] == "/isobatch-job/mine.py:Mine"


@pytest.mark.parametrize(
    "text", ["a = 1\n\n", "  # ä 😀: kept \n \n\tb\n", "no = 'end'\nof a line", "a\n\x0c\u2028b\n", "one"]
)
def test_every_text_comes_out_of_the_manifest_as_it_went_in(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = shutil.copytree(ROOT / "examples" / "own_task", tmp_path / "own")
    (own / "more.py").write_text(text)
    (own / "mine.py").write_text((own / "mine.py").read_text() + "\nif 0:\n    import more\n")
    assert submit(["--task", f"{own}/mine.py:Mine", *LEAST, "--cpu", "--name", "mine"]) == 0
    written = capsys.readouterr().out
    assert next(yaml.safe_load_all(written))["data"]["more.py"] == text
    assert '"recipe.yaml": |2+\n    task: ' in written, "people read it"
    assert ("|2" in written.partition('"more.py": ')[2][:3]) == ("\n" in text and "\x0c" not in text)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--data", "/home/me/texts"], "--data /home/me/texts: pods see .* and give /isobatch/texts"),
        (["--data", "texts"], "--data texts: pods see /isobatch and their image alone: copy it into --claim"),
        (["--data", "/isobatch/texts", "--model", "~/gpt2"], "--model ~/gpt2: pods see"),
        (["--data", "/isobatch/texts"], None),
        (["--data", "roneneldan/TinyStories"], None),
    ],
)
def test_a_path_that_no_pod_sees_is_named(
    words: list[str],
    said: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "train.txt").write_text("a text\n" * 50)
    assert submit(["--task", "causal-lm", *words, *LEAST, "--cpu"]) == 0
    for found in capsys.readouterr():
        assert re.search(said, found) if said else "pods see" not in found
    monkeypatch.setattr(job, "_apply", lambda _: "applied")
    with pytest.raises(UserError, match=said) if said else contextlib.nullcontext():
        submit(["--task", "causal-lm", *words, *LEAST, "--cpu", "--submit"])


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("flag", [*consent.PLACES, "from", "template"])
def test_what_lies_in_the_claim_is_for_pods_to_read(
    task: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A manifest is made, with the plan where the model is not what is missing here."""
    if flag not in known_flags(task) or (task, flag) == ("sequence-vae", "model"):
        pytest.skip("no such flag")
    words = {"data": "/isobatch/rows.jsonl", flag: "/isobatch/mine"}
    asked = [f"--{name}={value}" for name, value in words.items()]
    assert submit(["--task", task, *asked, *LEAST, "--gpus-per-node", "1"]) == 0
    printed, said = capsys.readouterr()
    recipe = next(yaml.safe_load_all(printed))["data"]["recipe.yaml"]
    assert yaml.safe_load(recipe)[flag] == "/isobatch/mine"
    assert "pods see" not in printed
    assert ("--from /isobatch/mine" in said) == (flag == "from")
    if flag in ("model", "teacher", "pruned"):
        why = "lies in the claim|as a hub id" if flag == "teacher" else "lies in the claim"
        assert re.search(rf"(?m)^# no plan: .*({why})", printed)


def test_a_run_that_lies_here_is_named_in_the_recipe_of_pods(tmp_path: Path) -> None:
    recipe = Recipe(task="causal-lm", starts_from={"run": str(tmp_path)})
    request = dataclasses.replace(parse_request(["--task", "causal-lm"], "auto"), recipe=recipe)
    assert yaml.safe_load(request_text(request))["from"] == str(tmp_path)


def test_kustomize_adds_the_fields_of_a_cluster_as_the_page_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not here")
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    (patch,) = re.findall(r"(?s)>kustomization\.yaml <<'END'\n(.*?)END\n", page)
    assert submit([*GPUS, "--name", "week"]) == 0
    (tmp_path / "job.yaml").write_text(printed := capsys.readouterr().out)
    (tmp_path / "kustomization.yaml").write_text(patch)
    words = ["kubectl", "kustomize", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    *others, job = sorted(yaml.safe_load_all(done.stdout), key=lambda one: one["kind"] == "Job")
    *_, ours = yaml.safe_load_all(printed)
    assert job["metadata"]["labels"].pop("kueue.x-k8s.io/queue-name") == "research"
    spec = job["spec"]["template"]["spec"]
    assert spec.pop("tolerations")[0]["key"] == "nvidia.com/gpu"
    assert spec.pop("priorityClassName") == "high"
    assert (spec.pop("imagePullSecrets"), spec.pop("serviceAccountName")) == (
        [{"name": "registry"}],
        "trainer",
    )
    assert job == ours, "all else is as it was"
    assert {one["kind"] for one in others} == {"ConfigMap", "Service"}


@pytest.mark.parametrize(
    "flag", ["toleration", "tolerations", "priority-class", "queue", "image-pull-secret", "service-account"]
)
def test_a_field_without_a_flag_is_answered_with_kustomize(flag: str) -> None:
    with pytest.raises(UserError, match=rf"--{flag} x: kustomize writes it .*docs/kubernetes.md"):
        submit([*GPUS, f"--{flag}", "x"])


@pytest.mark.parametrize(
    ("text", "labels"),
    [("gpu=h100", {"gpu": "h100"}), ("gpu=l4,zone=b,spot=", {"gpu": "l4", "zone": "b", "spot": ""})],
)
def test_nodes_have_all_labels_that_are_asked_for(
    text: str, labels: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit([*GPUS, "--node-selector", text]) == 0
    printed = capsys.readouterr().out
    *_, job = yaml.safe_load_all(printed)
    assert job["spec"]["template"]["spec"]["nodeSelector"] == labels
    assert f"# The plan of 4x8x{labels['gpu']}" in printed


@pytest.mark.parametrize("words", [[], ["--user", "4242"]])
def test_a_pod_is_what_restricted_namespaces_admit(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """By https://kubernetes.io/docs/concepts/security/pod-security-standards, `restricted`."""
    pod = manifest(capsys, *GPUS, "--name", "week", *words)["Job"]["spec"]["template"]["spec"]
    (container,), user = pod["containers"], int(words[1]) if words else 1000
    secure = pod["securityContext"]
    assert (secure["runAsNonRoot"], secure["seccompProfile"]) == (True, {"type": "RuntimeDefault"})
    assert {secure["runAsUser"], secure["runAsGroup"], secure["fsGroup"]} == {user}, "no root"
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {"HOME", "USER"} <= {one["name"] for one in container["env"]}, "a number without a passwd entry"
    allowed = {"configMap", "emptyDir", "persistentVolumeClaim"}
    assert all(volume.keys() - {"name"} <= allowed for volume in pod["volumes"])
    assert pod["automountServiceAccountToken"] is False
    shared = [volume["emptyDir"]["sizeLimit"] for volume in pod["volumes"] if "emptyDir" in volume]
    assert shared == [f"{256 * 512}Mi"], "half of the pod's memory"


def test_secrets_stay_in_the_cluster(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_this_user")
    assert submit([*GPUS, "--secret", "hub"]) == 0
    text = capsys.readouterr().out
    assert "hf_of_this_user" not in text
    *_, job = yaml.safe_load_all(text)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["envFrom"] == [{"secretRef": {"name": "hub"}}]


@pytest.mark.parametrize(
    ("status", "verdict", "code"),
    [
        ("done", Verdict(STOPPED, "asked by an eviction when all was done"), DONE),
        ("stopped", Verdict(STOPPED, "asked to stop by a signal"), STOPPED),
        ("failed", Verdict(FAILED, "the loss is NaN"), FAILED),
        ("failed", Verdict(FAILED, "rank 1 is lost", WorkerLostError.cause), BUG),
        ("failed", Verdict(FAILED, "no space left on device", DiskFullError.cause), BUG),
        (None, Verdict(WRONG_INPUT, "no such data"), WRONG_INPUT),
        ("stopped", None, BUG),
    ],
)
def test_a_job_learns_how_its_pod_ended(
    status: str | None, verdict: Verdict | None, code: int, tmp_path: Path
) -> None:
    """Without a verdict of its own a pod was killed, whatever an earlier one has left."""
    run = RunFolder(tmp_path)
    if status:
        run.write_summary({"status": status})
    run.write_exit(verdict or Verdict(FAILED, "of an earlier start"))
    assert exit_code(run, verdict) == code


@pytest.mark.parametrize("words", [[], ["/isobatch/runs/week", "recipe.yaml"]])
def test_outside_of_a_pod_it_is_said(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JOB_COMPLETION_INDEX", raising=False)
    with pytest.raises(UserError, match="runs in a pod"):
        pod(words)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--task", "causal-lm", "--claim", "a", "--cpu"], "--image"),
        (["--task", "causal-lm", *LEAST], "--gpus-per-node, or --cpu"),
        ([*GPUS, "--cpu"], "--cpu: "),
        ([*GPUS[:-1], "a100:4"], "without a type: --gpus-per-node 4 --node-selector gpu=a100$"),
        *(([*GPUS, "--name", name], f"--name {name}: .* last$") for name in ("My_Run", "1run", "run-")),
        *(
            (["--task", "causal-lm", "--image", "a", "--claim", name, "--cpu"], f"--claim {name}: .*small")
            for name in ("Shared_X", "a-")
        ),
        *(
            ([*GPUS, "--node-selector", text], f"--node-selector {text}")
            for text in ("gpu", "gpu=a,", "gpu=a,b", ",gpu=a", "gpu=azone=b")
        ),
        ([*GPUS, "--processes", "6"], "--processes 6: must be a multiple of --nodes 4"),
        *(
            ([*GPUS, "--mem", text], f"--mem {text}: .* as in --mem 64Gi")
            for text in ("64", "64m", "lots", "64GB", "100Mi")
        ),
        (["--task", "causal-lm", "--image", "a", "--claim", "a b", "--cpu"], "--claim a b"),
        (["--task", "causal-lm", "--image", "a b", "--claim", "a", "--cpu"], "--image a b"),
        ([*GPUS, "--node-selector", "gpu=h 100"], "--node-selector gpu=h 100"),
        ([*GPUS, "--secret", "HF_TOKEN=x"], "--secret: give a Secret's name"),
    ],
)
def test_wrong_words_are_one_line(words: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says) as raised:
        submit(words)
    assert "\n" not in str(raised.value)


def test_kubectl_gets_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*GPUS, "--name", "week", "--submit"]
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="there is no kubectl here"):
        submit(words)
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f'#!/bin/sh\necho "$@"\n/bin/cat > {tmp_path}/given\n')
    kubectl.chmod(0o755)
    assert submit(words) == 0
    assert capsys.readouterr().out == "apply -f -\n"
    assert [d["kind"] for d in yaml.safe_load_all((tmp_path / "given").read_text())][-1] == "Job"
    kubectl.write_text("#!/bin/sh\necho 'error: forbidden' >&2\nexit 1\n")
    with pytest.raises(UserError, match="kubectl: error: forbidden"):
        submit(words)
