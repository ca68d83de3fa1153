"""`python -m distdl provision azureml`: prints a plan, asks the user, and executes the plan."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distdl.launchers.azureml import vm_sizes
from distdl.launchers.azureml.client import code_of, from_environment
from distdl.launchers.azureml.provision import diff
from distdl.launchers.azureml.provision import settings as all_settings
from distdl.launchers.azureml.provision.arm import Arm
from distdl.launchers.azureml.provision.diff import Action, ResourceStep, replaced
from distdl.launchers.azureml.provision.resources import resources
from distdl.launchers.azureml.provision.settings import ProvisionSettings
from distdl.launchers.azureml.provision.values import Ids, Ref
from distdl.util.errors import Problem, UserError

if TYPE_CHECKING:
    from azure.core.credentials import TokenCredential


def run(overrides: Mapping[str, Any], credential: TokenCredential | None = None) -> tuple[int, str]:
    """Runs the command with the user's dotted keys, which provision.yaml lists, and a credential
    (None: the signed-in user's).

    Returns:
        1 if a step failed or the user did not answer yes, else 0; and what to print at the end.

    Raises:
        UserError: Settings, sign-in or existing resources forbid it; nothing was created.
    """
    overrides = {**from_environment(), **overrides}  # the launcher's variables for these names
    settings = all_settings.read(overrides)
    for size in (settings.compute.vm_size, settings.build_compute.vm_size):
        if note := vm_sizes.unknown_note(size):
            print(f"note: {note}", file=sys.stderr)
    if settings.dry_run:
        return 0, render(settings)
    arm = Arm(settings.resource_manager, credential)
    if settings.subscription is None:
        settings = all_settings.read({**overrides, "subscription": only_subscription(arm)})
    steps, known, others = query_existing(settings, arm)
    print(show(settings, steps, others))
    refuse_fixed(steps)
    todo = [s for s in steps if s.action is not Action.UNCHANGED]
    if todo and not settings.confirm:
        if not sys.stdin.isatty():
            raise UserError.at(
                "confirm",
                what="there is no terminal to ask for confirmation",
                remedy="write confirm=true",
                code="missing-key",
            )
        if input("Continue? Type yes: ").strip().lower() != "yes":
            return 1, "Nothing was changed."
    if not apply(todo, known, arm):
        return 1, "Not everything was created: see above."
    return 0, next_command(settings)


def render(settings: ProvisionSettings) -> str:
    """The resources as YAML documents; works offline."""
    import yaml

    wanted = resources(settings)
    parts = [
        f"# {len(wanted)} resources, in this order. Azure was not queried, and nothing is created."
    ]
    if settings.subscription is None:
        parts.append("# The subscription is not set; names that end in a hash depend on it.")
    for number, resource in enumerate(wanted, start=1):
        head = {"id": resource.id, "apiVersion": resource.api}
        text = yaml.safe_dump({**head, **replaced(resource.body, str)}, sort_keys=False, width=1000)
        parts.append(f"---\n# {number} {resource}\n{text.rstrip()}")
    return "\n".join(parts)


def only_subscription(arm: Arm) -> str:
    visible = list(arm.list("/subscriptions", "2022-12-01"))
    if len(visible) == 1:
        return str(visible[0]["subscriptionId"])
    names = ", ".join(f"{s['subscriptionId']} ({s.get('displayName', '')})" for s in visible)
    raise UserError.at(
        "subscription",
        what=f"you can see {len(visible) or 'no'} subscription{'s' if visible else ''}",
        remedy=f"write subscription=ID, of: {names}" if visible else "az login",
        code="ambiguous" if visible else "not-found",
    )


def query_existing(
    settings: ProvisionSettings, arm: Arm
) -> tuple[list[ResourceStep], dict[str, Any], list[str]]:
    """Queries the existing resources. Returns a step per resource, Azure's answers by ARM id, and
    the names of the group's other resources."""
    ids = Ids(settings)
    subscription = arm.get(ids.subscription, "2022-12-01")
    if subscription is None:
        raise UserError.at(
            "subscription",
            what=f"there is no subscription {settings.subscription}, or you may not see it",
            remedy="az account list; az login",
            code="not-found",
        )
    known: dict[str, Any] = {ids.subscription: subscription}
    group, *_ = wanted = resources(settings)
    exists = arm.get(group.id, group.api) is not None
    steps = []
    for resource in wanted:
        # Without the group nothing else can exist.
        actual = arm.get(resource.id, resource.api) if exists else None
        if actual is None:
            steps.append(ResourceStep(resource, None))
            continue
        known[resource.id] = actual
        wrong = diff.differences(diff.resolve(resource.body, known), actual)
        steps.append(ResourceStep(resource, actual, tuple(wrong)))
    planned = {resource.id.casefold() for resource in wanted}
    listed = arm.list(f"{ids.group}/resources", "2021-04-01") if exists else ()
    others = [each for each in listed if each["id"].casefold() not in planned]
    return steps, known, [f"{each['type'].rpartition('/')[2]} {each['name']}" for each in others]


def show(settings: ProvisionSettings, steps: Sequence[ResourceStep], others: Sequence[str]) -> str:
    group = f"{settings.resource_group}, {settings.location}, subscription {settings.subscription}"
    text = [f"Workspace {settings.workspace} in resource group {group}", ""]
    width = max(len(s.resource.kind) for s in steps)
    for each in steps:
        resource = each.resource
        text.append(f"  {each.action:<13}  {resource.kind:<{width}}  {resource.name}")
        text += [f"  {'':<13}  {difference}" for difference in each.differences]
    count = Counter(s.action for s in steps)
    text += [
        "",
        f"{count[Action.CREATE]} to create, {count[Action.CHANGE] + count[Action.FIXED]} that "
        f"differ, {count[Action.UNCHANGED]} unchanged.",
        "Nothing is deleted, and settings that are not listed here stay as they are.",
    ]
    if others:
        more = f" and {len(others) - 10} more" if len(others) > 10 else ""
        text.append(f"Not touched in this group: {', '.join(others[:10])}{more}.")
    return "\n".join(text)


def refuse_fixed(steps: Sequence[ResourceStep]) -> None:
    """Raises, before anything is created, if a resource differs in a value Azure cannot change."""
    problems = []
    for resource, difference in [(s.resource, d) for s in steps for d in s.fixed]:
        what = f"{difference}: Azure cannot change this after it has created a {resource.kind}"
        rename = ""
        if resource.named_by:
            rename = f"give it another name ({resource.named_by}=NAME), or "
        problems.append(
            Problem(
                str(resource),
                what=what,
                remedy=f"{rename}set the existing value",
                code="unsupported",
            )
        )
    if problems:
        raise UserError(*problems)


def apply(todo: Sequence[ResourceStep], known: dict[str, Any], arm: Arm) -> bool:
    """Creates and changes resources one by one. Stops and returns False at the first failure."""
    for number, each in enumerate(todo, start=1):
        resource = each.resource
        started = time.monotonic()
        doing = "creating" if each.action is Action.CREATE else "changing"
        count = f"{number:>{len(str(len(todo)))}}/{len(todo)}"
        print(f"[{count}] {doing} {resource} ...", end="", flush=True)
        method, body = each.request(known)
        unknown: list[Ref] = []
        replaced(body, unknown.append)
        try:
            if unknown:
                raise UserError.at("", what=f"Azure did not report {unknown[0]}", code="failed")
            known[resource.id] = arm.send(method, resource.id, resource.api, body)
        except UserError as error:
            # Somebody granted the role by hand, so it has another GUID.
            if code_of(error.__cause__) == "RoleAssignmentExists":
                print(" exists already")
                continue
            print(" failed")
            print(f"{resource}: {error}", file=sys.stderr)
            done = f"{number - 1} of {len(todo)} are done"
            print(f"{done}; to continue, run the same command again.", file=sys.stderr)
            return False
        print(f" done, {time.monotonic() - started:.0f} s")
    return True


def next_command(settings: ProvisionSettings) -> str:
    text = f"""\
All resources exist. Upload data to the container data, which jobs read as
azureml://datastores/distdl_data/paths/FOLDER. Next, in the same environment:

python -m distdl +experiment=... launcher=azureml \\
    launcher.subscription={settings.subscription} \\
    launcher.resource_group={settings.resource_group} \\
    launcher.workspace={settings.workspace} \\
    launcher.compute={settings.compute.name} \\
    launcher.vm_size={settings.compute.vm_size} \\
    launcher.tier={settings.compute.tier} \\
    launcher.datastore=distdl_results \\
    launcher.identity=managed \\
    dry_run=true"""
    if settings.private:
        text += "\n(the workspace can be reached only from inside its virtual network)"
    return text
