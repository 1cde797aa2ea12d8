"""What each key of a profile means, in one sentence: the descriptions of the JSON Schema and of the reference page.

Keys are written ``section.key``; the keys of all kinds of jobs and of all providers that come with UVCC stand together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

MEANINGS: Final[dict[str, str]] = {
    "job": "What is computed: a private training or inference, a language model, or a command of your own.",
    "job.kind": "private (on secret shares), lm (language model) or command (anything that writes the run contract).",
    "job.model": "A shipped model by name, a list of layers, file.py:Model, a torch.nn.Module that is exported, or the"
    " model.json that uvcc owner open wrote; a relative path is relative to the profile.",
    "job.steps": "Training steps of the full run; a private job may give epochs instead, whose steps the plan counts.",
    "job.epochs": "Passes over the training rows, instead of steps; 0 takes steps.",
    "job.batch": "Rows that each replica takes in one step.",
    "job.lr": "Learning rate at its highest.",
    "job.momentum": "Momentum of SGD, and Adam's first decay rate.",
    "job.schedule": "How the learning rate falls: linear or cosine to nothing, or constant.",
    "job.warmup": "Steps over which the learning rate rises by a line.",
    "job.weight_decay": "What every matrix loses per unit of the learning rate, apart from its gradient.",
    "job.clip_norm": "The gradient of each weight is scaled down to this norm where it is longer; 0 for never.",
    "job.seed": "Decides the order of batches, the initial weights and the schedule. It is public.",
    "job.frac_bits": "Fractional bits of the fixed point numbers that are shared.",
    "job.reveal": "What the run opens; what is not listed stays shared. Signed in the policy.",
    "job.loss_every": "Steps between two revealed losses.",
    "job.checkpoint_every": "Steps between two checkpoints that all three parties commit.",
    "job.test_rows": "Rows that are kept for the metrics at the end.",
    "job.val_rows": "Rows that are kept for validation; where a schema is given, its split.validation decides.",
    "job.val_every": "Steps between two validations; 0: one epoch where job.epochs is given, else only at the end.",
    "job.val_budget": "Validations that may be revealed at most, else the plan is refused; 0 for any number.",
    "job.patience": "The training ends when val_loss has not fallen in so many validations; 0 for never.",
    "job.keep_best": "What is tested and released are the weights of the least val_loss, not the last ones.",
    "job.class_weights": "What a row of each class counts in the loss, in the order of the classes: above 0, up to 16.",
    "job.label_smoothing": "So much of each training row's target is spread over all classes, like 0.1.",
    "job.row_weights": "Each training row counts as its own secret weight says; the column is the schema's weight.",
    "job.threshold": "precision and recall count a row for the second class from this probability on.",
    "job.optimizer": "sgd or adam.",
    "job.beta2": "Adam's second decay rate.",
    "job.objective": "The loss that is trained on; where a schema is given and this is not, its target decides.",
    "job.min_rows": "No number is revealed that is of fewer rows than this.",
    "job.task": "train; infer: answer the owner's queries with weights that the owner brings; serve: those of clients.",
    "job.clients": "Keys of those who may ask a served model (task serve), as uvcc infer init prints them.",
    "job.idle": "Without a query for so long a served model waits no more: its steps that are left are run empty. 0 "
    "for never.",
    "job.device": "Where shares are computed: cpu, cuda, or auto, which is each pod's GPU if it has one. Proofs "
    "of them are computed on processors.",
    "job.rounds": "few (between domains), sparing (on one machine), or auto, which chooses by where the pods are.",
    "job.verify": "proofs: every message is proved before a step reveals anything; products: each product is; covert: "
    "every message of the steps that are drawn for an audit; off: nothing is.",
    "job.audit_one_in": "With verify: covert, each domain's step is audited with a chance of one in so many.",
    "job.standardise": "Each column to mean 0 and deviation 1 over all owners' rows, by statistics kept in shares.",
    "job.standardise_by": "What it is brought to: deviation (as above), range (0 to 1 from its least to its greatest "
    "value) or quantiles (0 to 1 between 0.01 and 0.99, cut there).",
    "job.join": "Owners hold different columns of the same rows: key (the column that all have), columns (how many "
    "features each gives, in the proposal's order), label (the number of the one who has the labels), form (how keys "
    "are compared: text, exact, number), outputs (classes, or 1, of a model that is a list of layers).",
    "job.data": "The owner's file of rows; a relative path is relative to the profile.",
    "job.schema": "What the columns of job.data are, as uvcc data infer writes it; none: each is a number to train on, "
    "though a schema lies beside the table.",
    "job.labels": "The owner's file of labels, where data does not hold them.",
    "job.weights": "The owner's trained weights, for the tasks infer and serve.",
    "job.base": "A safetensors file of public weights that the model is made around; uvcc-engine base writes one.",
    "job.base_sha256": "The SHA-256 that the base must have; without it the plan takes that of the file.",
    "job.tokenizer": "The SHA-256 that the tokenizer of the schema's text must have; without it the plan takes that of "
    "the file.",
    "job.adapters": "What of the base is trained in secret. rank (of each adapter, 0 for none), scale (LoRA's alpha / "
    "rank), layers (the base's tensors that get one, like weight.3; empty for each dense layer but the last), head "
    "(that last layer: train from the base's weights, new for the data's own classes, adapter, public).",
    "job.config": "A packaged configuration of the language-model trainer, or a YAML file of your own.",
    "job.ranks": "Worker processes of the one pod.",
    "job.overrides": "Keys of the trainer's configuration, section by section, that this profile sets otherwise.",
    "job.plan": "Facts that must hold of what runs (parameters, seq_len, precision, ...); else it does not start.",
    "job.fetch_checkpoint": "Bring each checkpoint of the full run home while it goes on.",
    "job.fetch_mib_s": "MiB a second that may be fetched beside the training.",
    "job.fetch_keep": "How many of the newest checkpoints are kept at home.",
    "job.argv": "The command and its arguments, {here} for the profile's folder; its run directory is in UVCC_RUN_DIR.",
    "job.cwd": "The folder in which the command starts; with job.code one in the uploaded folder.",
    "job.code": "A folder here that is uploaded to every pod, without what git ignores and what looks like a secret.",
    "job.code_include": "Patterns of files that are uploaded although they look like secrets.",
    "job.code_exclude": "Patterns of files that are not uploaded, beside those of .gitignore.",
    "job.code_mib": "How large the uploaded folder may be, in MiB.",
    "job.setup": "A command that is run once on every pod in the uploaded folder; auto installs what its "
    "requirements.txt or pyproject.toml asks for.",
    "job.artifacts": "Patterns of files that come home from the folder that the command worked in, like out/*.pt.",
    "job.halt": "control-file: the program holds and halts by it; sigterm: it never looks, and SIGTERM ends it.",
    "topology": "How many workers each party has, and how the model lies on them.",
    "topology.replicas": "Data-parallel replicas of each party; one pod each.",
    "topology.stages": "Pipeline stages of each replica.",
    "topology.tensor": "Tensor-parallel ranks of each stage.",
    "topology.microbatches": "Parts into which a batch is cut for the pipeline.",
    "fleet": "Where pods come from.",
    "fleet.provider": "local, inventory, prime, runpod, lambda, vast, slurm, kubernetes, skypilot or installed.",
    "fleet.queue_hours": "Hours that a job may wait in its queue before it is given up (provider slurm).",
    "fleet.price": "US dollars an hour that a pod counts as against the limits (slurm, kubernetes).",
    "fleet.infra": "Clouds or regions that may be used, like aws or gcp/us-central1 (provider skypilot).",
    "fleet.context": "The kubeconfig's context; empty for its current one (provider kubernetes).",
    "fleet.kubeconfig": "The kubeconfig file; else KUBECONFIG, ~/.kube/config, or this pod's own account.",
    "fleet.namespace": "The namespace that pods are made in; empty for the context's.",
    "fleet.gpu_label": "The label of nodes that names their GPU, which fleet.gpu is compared with.",
    "fleet.resource": "What the cluster counts GPUs as.",
    "fleet.cpus": "CPUs that each pod requests; 0: the default of the cluster (slurm only).",
    "fleet.memory": "GiB of memory that each pod requests; 0: the default of the cluster (slurm only).",
    "fleet.scratch": "A folder on each node for all that pods write; empty for TMPDIR or /tmp (provider slurm).",
    "fleet.node_selector": "Further labels that a pod's node must have.",
    "fleet.user": "Who the image's container runs as.",
    "fleet.account": "One of several accounts at the vendor; its key is found under its own name only.",
    "fleet.per_party": "The market's provider for each of the three parties, in order.",
    "fleet.gpu": "The GPU's name as the provider writes it; empty for any.",
    "fleet.gpus": "GPUs of one pod.",
    "fleet.gpu_memory": "GiB that a GPU must have at least; 0 asks for nothing.",
    "fleet.image": "The image that pods start from, by the provider's name.",
    "fleet.regions": "Regions that may be taken; empty for any.",
    "fleet.country": "Country that pods must be in; empty for any.",
    "fleet.spot": "Machines that may be taken away: no, yes, or {replace: N, then: on_demand | stop}.",
    "fleet.disk": "GiB of disk of a pod; 0 takes what the offer includes.",
    "fleet.max_price": "US dollars an hour that one pod may cost; 0 for no cap of its own.",
    "fleet.fallbacks": "Where to go, in order, without stock, quota or answer: what differs, as in fleet.",
    "fleet.wait_for_stock": "Hours to wait for offers within fleet.max_price, with nothing rented; 0: none.",
    "fleet.volume": "Where an lm's checkpoints outlive pods: {size_gb: N}, {name: X}, {path: /X}; mount, keep, price.",
    "fleet.storage_class": "The storage class of volumes; empty for the cluster's own (provider kubernetes).",
    "fleet.ssh_key": "An unlocked OpenSSH private key that opens the pods; without it the run makes a key of its own.",
    "fleet.keep_pods": "Leave the pods after a good end; a process here ends them at limits.ttl.",
    "fleet.replace_lost": "Lost pods that are replaced without being asked.",
    "fleet.reserve": "Rent the full run's pods before the smoke, although some are idle then.",
    "fleet.attach_prefix": "uvcc-RUN-: use the pods that this run kept, and create none.",
    "fleet.parties": "A provider for each of P0, P1 and P2; what stands beside it holds where they say nothing.",
    "fleet.wheels": "A folder of wheels that are sent to the pods; no package index is asked then.",
    "fleet.packages": "Packages that each pod installs beside its image.",
    "fleet.hosts": "The YAML file that lists your machines (provider inventory).",
    "fleet.socket": "How the market's GPUs are attached: PCIe or SXM (provider prime).",
    "fleet.data_center": "One data centre of the market (provider prime).",
    "fleet.base_url": "Another address of the vendor's API, to which your key must be allowed to go.",
    "link": "How parties reach each other: direct, relay (HTTP), stream (the relay's stream), nats, or auto.",
    "nats": "The JetStream server of link nats.",
    "nats.url": "Its address, nats:// or tls://.",
    "nats.token_file": "A file here with its token.",
    "nats.ca_file": "A file here with the certificate that signed the server's.",
    "smoke": "What the smoke changes; everything else is as in the full run.",
    "smoke.replicas": "Replicas of the smoke.",
    "smoke.steps": "Steps of the smoke; 0 leaves it out.",
    "gates": "What must be measured of the smoke before the full run starts.",
    "gates.loss_falls": "The last loss of every worker is below its first.",
    "gates.result_hashes": "How many different result hashes there may be: 1, all workers agree.",
    "gates.verifier": "ok: the smoke's bundle verifies; any: it is not asked.",
    "gates.halt_drill_s": "Seconds within which the drill held and released every pod; 0: no gate. Where it is not "
    "given and two private steps are foretold to take longer, these and 30 s; on GPUs, whose first step compiles "
    "kernels, at least 50 s.",
    "gates.clock_skew_s": "Seconds that a pod's clock may differ; checked in preflight.",
    "gates.disk_free_mib": "MiB that every pod must have free; checked in preflight, and watched afterwards.",
    "gates.toks_per_s": "Tokens a second at least; 0: no gate.",
    "gates.gate_entropy": "Mean entropy of the attention gates at least; 0: no gate.",
    "gates.gate_collapse": "Share of collapsed attention gates at most; 1: no gate.",
    "gates.gpu_mem_mib": "MiB of GPU memory reserved at most; 0: no gate.",
    "gates.watchdog_dumps": "Stalls at most; -1: no gate.",
    "gates.fetch_s": "Seconds at most that a step waits for its data; 0: no gate.",
    "gates.at": "Steps of the full run at which its rows are measured against the gates again; a miss halts.",
    "gates.resume_at": "A step of a language model's full run at which halt and exact resume are rehearsed; 0: never.",
    "gates.attention": "A language model's attention is tried on the pods before training; auto: full on GPUs only.",
    "limits": "Caps in US dollars, and lifetimes.",
    "limits.hourly": "US dollars an hour at most; 0: nothing may be spent.",
    "limits.total": "US dollars in all at most; 0: nothing may be spent.",
    "limits.ttl": "The run's whole life; then it is torn down.",
    "limits.wait": "How long pods are kept for a decision after a halt or a failure.",
    "limits.stall": "How long no worker may give a sign of life before the run has failed.",
    "limits.resumes": "How often the run goes on by itself from the last common checkpoint where a worker was killed, "
    "or a worker or pod went silent (of a command: where it failed), and under another conductor where its own died. "
    "All else waits for somebody.",
    "halt": "How a halt goes.",
    "halt.lease": "The pods halt by themselves when nobody renewed for so long.",
    "halt.patience": "How long a pod may take to show that it holds; a drill has 20 s more, a halt six times that. "
    "Where it is not given and a private step is foretold to take more than half of it, two such steps, 600 s at most.",
    "halt.auto": "Rungs of the halt ladder that are climbed; beyond them a tear-down ends the pods.",
    "consent": "How many of the three domains must sign.",
    "consent.full": "Signatures before the full run.",
    "consent.resume": "Signatures before workers go on from a checkpoint; each names which resume it is for.",
    "consent.terminate": "Signatures before pods are terminated on request.",
    "evidence": "How evidence is dated and published.",
    "evidence.timestamp": "An RFC 3161 service that dates each policy before its first step, and each proof bundle.",
    "evidence.log": "A transparency log with Rekor's interface: each policy before its first step, each run root.",
    "evidence.log_key": "A file with that log's public key (PEM); without it the key that the log gives out.",
    "env": "Environment variables of the workers.",
    "secrets": "Names of environment variables, keys of services say, whose values the workers get from where "
    "`uvcc rollout` or `uvcc resume` runs. No value is written to profile, journal or package.",
    "dp_preflight": "Rehearse the run's own network before the smoke.",
}
_SECTIONS: Final = {
    "PrivateJobSettings": "job",
    "LmJobSettings": "job",
    "CommandJobSettings": "job",
    "TopologyPart": "topology",
    "SmokePart": "smoke",
    "GatesPart": "gates",
    "LimitsPart": "limits",
    "HaltPart": "halt",
    "ConsentPart": "consent",
    "NatsPart": "nats",
    "EvidencePart": "evidence",
}


def section_of(part: str, about: dict[str, Any]) -> str:
    """The section that a definition of the schema describes; empty for none."""
    return _SECTIONS.get(part) or ("fleet" if "provider" in about.get("properties", {}) else "")


def keys(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every key of a profile's JSON Schema, as ``section.key``, with its part of the schema."""
    yield from schema["properties"].items()
    for part, about in schema.get("$defs", {}).items():
        if section := section_of(part, about):
            for key, found in about.get("properties", {}).items():
                yield f"{section}.{key}", found


def described(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with the meaning of every key that has one here; keys of foreign providers keep their own."""
    for key, found in keys(schema):
        if key in MEANINGS:
            found["description"] = MEANINGS[key]
    return schema
