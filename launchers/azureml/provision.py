"""`python -m distdl provision azureml`: says what it would do, asks, and does only that."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from distdl.errors import Problem, UserError
from distdl.launchers.azureml import provision_settings, vm_sizes
from distdl.launchers.azureml.client import from_environment
from distdl.launchers.azureml.provision_arm import Arm, ArmError
from distdl.launchers.azureml.provision_plan import Action, Step, replaced, step
from distdl.launchers.azureml.provision_resources import resources
from distdl.launchers.azureml.provision_settings import Settings
from distdl.launchers.azureml.provision_values import Ids, Ref


def run(overrides: Mapping[str, Any], credential: Any = None) -> int:
    """The whole command.

    Args:
        overrides: Dotted key -> value; provision.yaml has all keys.
        credential: Whose access, None for whoever is logged in.

    Returns:
        0 when everything is as wanted; 1 when Azure failed on the way or the answer was no.

    Raises:
        UserError: Settings, login or what exists forbid it; nothing was made.
    """
    settings = provision_settings.read(with_environment(overrides))
    for size in (settings.compute.vm_size, settings.build_compute.vm_size):
        if said := vm_sizes.unknown(size):
            print(f"note: {said}", file=sys.stderr)
    if settings.dry_run:
        print(render(settings))
        return 0
    arm = Arm(settings.resource_manager, credential)
    if settings.subscription is None:
        chosen = {**with_environment(overrides), "subscription": only_subscription(arm)}
        settings = provision_settings.read(chosen)
    steps, known, others = look(settings, arm)
    print(show(settings, steps, others))
    refuse_fixed(steps)
    todo = [s for s in steps if s.action is not Action.UNCHANGED]
    if todo and not settings.confirm:
        if not sys.stdin.isatty():
            what = "nobody can be asked here, there is no terminal"
            raise UserError(Problem("confirm", what, "write confirm=true"))
        if input("Go on? Type yes: ").strip().lower() != "yes":
            print("Nothing was done.")
            return 1
    code = apply(todo, known, arm)
    if code == 0:
        print(next_step(settings))
    return code


def with_environment(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The names that the launcher takes from the environment too."""
    return {**from_environment(), **overrides}


def render(settings: Settings) -> str:
    """The resources as documents of YAML, without asking anybody."""
    import yaml

    found = resources(settings)
    parts = [f"# {len(found)} resources, in this order. Nothing was asked, nothing is made."]
    if settings.subscription is None:
        parts.append("# The subscription is not given; names that end in a hash depend on it.")
    for number, resource in enumerate(found, start=1):
        head = {"id": resource.id, "apiVersion": resource.api}
        text = yaml.safe_dump({**head, **replaced(resource.body, str)}, sort_keys=False, width=1000)
        parts.append(f"---\n# {number} {resource}\n{text.rstrip()}")
    return "\n".join(parts)


def only_subscription(arm: Arm) -> str:
    """The one subscription that the user can see."""
    found = list(arm.list("/subscriptions", "2022-12-01"))
    if len(found) == 1:
        return str(found[0]["subscriptionId"])
    seen = [f"{each['subscriptionId']} ({each.get('displayName', '')})" for each in found]
    what = f"you can see {len(seen)} subscriptions" if seen else "you can see no subscription"
    remedy = f"write subscription=ID, of: {', '.join(seen)}" if seen else "az login"
    raise UserError(Problem("subscription", what, remedy))


def look(settings: Settings, arm: Arm) -> tuple[list[Step], dict[str, Any], list[str]]:
    """What is there.

    Returns:
        A step per resource, what Azure answered by ARM id, and names of others in the group.
    """
    ids = Ids(settings)
    subscription = arm.get(ids.subscription, "2022-12-01")
    if subscription is None:
        what = f"there is no subscription {settings.subscription}, or you may not see it"
        raise UserError(Problem("subscription", what, "az account list; az login"))
    known: dict[str, Any] = {ids.subscription: subscription}
    wanted = resources(settings)
    exists = arm.get(wanted[0].id, wanted[0].api) is not None
    steps: list[Step] = []
    for resource in wanted:
        # Without its group nothing else can be there.
        actual = arm.get(resource.id, resource.api) if exists else None
        if actual is not None:
            known[resource.id] = actual
        steps.append(step(resource, actual, known))
    others: list[str] = []
    if exists:
        ours = {resource.id.casefold() for resource in wanted}
        for each in arm.list(f"{ids.group}/resources", "2021-04-01"):
            if each["id"].casefold() not in ours:
                others.append(f"{each['type'].rpartition('/')[2]} {each['name']}")
    return steps, known, others


def show(settings: Settings, steps: Sequence[Step], others: Sequence[str]) -> str:
    """The plan."""
    text = [
        f"Workspace {settings.workspace} in resource group {settings.resource_group}, "
        f"{settings.location}, subscription {settings.subscription}",
        "",
    ]
    kinds = max(len(s.resource.kind) for s in steps)
    for each in steps:
        resource = each.resource
        text.append(f"  {each.action:<13}  {resource.kind:<{kinds}}  {resource.name}")
        text += [f"  {'':<13}  {d}" for d in each.differences]
    count = {action: sum(s.action is action for s in steps) for action in Action}
    text += [
        "",
        f"{count[Action.CREATE]} to create, {count[Action.CHANGE] + count[Action.FIXED]} that "
        f"differ, {count[Action.UNCHANGED]} unchanged.",
        "Nothing is deleted, and settings that are not named here stay as they are.",
    ]
    if others:
        more = f" and {len(others) - 10} more" if len(others) > 10 else ""
        text.append(f"Not touched in this group: {', '.join(others[:10])}{more}.")
    return "\n".join(text)


def refuse_fixed(steps: Sequence[Step]) -> None:
    """Stops before anything is made, where something exists that Azure cannot change."""
    problems = []
    for each in steps:
        named_by = each.resource.named_by
        remedy = f"give it another name ({named_by}=NAME), or " if named_by else ""
        for difference in each.fixed:
            what = f"{difference}: Azure sets this once, when it makes a {each.resource.kind}"
            remedy_text = f"{remedy}ask for what is there"
            problems.append(Problem(str(each.resource), what, remedy_text))
    if problems:
        raise UserError(*problems)


def apply(todo: Sequence[Step], known: dict[str, Any], arm: Arm) -> int:
    """Makes and changes, one after the other."""
    width = len(str(len(todo)))
    for number, each in enumerate(todo, start=1):
        resource, started = each.resource, time.monotonic()
        doing = "creating" if each.action is Action.CREATE else "changing"
        print(f"[{number:>{width}}/{len(todo)}] {doing} {resource} ...", end="", flush=True)
        method, body = each.request(known)
        unknown: list[Ref] = []
        replaced(body, unknown.append)
        try:
            if unknown:
                raise ArmError("", f"Azure did not say what is {unknown[0]}")
            known[resource.id] = arm.send(method, resource.id, resource.api, body)
        except (ArmError, UserError) as error:
            # Somebody has granted this by hand, under another GUID.
            if getattr(error, "code", "") == "RoleAssignmentExists":
                print(" is there already")
                continue
            print(" failed")
            print(f"{resource}: {error}", file=sys.stderr)
            if remedy := getattr(error, "remedy", ""):
                print(f"    {remedy}", file=sys.stderr)
            left = f"{number - 1} of {len(todo)} are done and stay"
            print(f"{left}; the same command goes on from here.", file=sys.stderr)
            return 1
        print(f" done, {time.monotonic() - started:.0f} s")
    return 0


def next_step(settings: Settings) -> str:
    """What to type now."""
    where = [
        f"launcher.subscription={settings.subscription}",
        f"launcher.resource_group={settings.resource_group}",
        f"launcher.workspace={settings.workspace}",
        f"launcher.compute={settings.compute.name}",
        f"launcher.vm_size={settings.compute.vm_size}",
        f"launcher.tier={settings.compute.tier}",
        "launcher.datastore=distdl_results",
        "launcher.identity=managed",
    ]
    lines = [
        "Everything is as wanted. Data go to the container data, which jobs read as",
        "azureml://datastores/distdl_data/paths/FOLDER. Next, in the same environment:",
        "",
        "python -m distdl +experiment=... launcher=azureml \\",
        *(f"    {each} \\" for each in where),
        "    dry_run=true",
    ]
    if settings.private:
        lines.append("(the workspace answers inside its virtual network only)")
    return "\n".join(lines)
