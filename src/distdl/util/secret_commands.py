# ruff: noqa: E501 - a pattern is one line here
"""Secrets without a name beside them: options of programs, arguments known by their place.

One pattern a line. Its group `value` is the secret, and the word before it is what every match has,
in lower case, with `_` for a blank: most files have none of them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator

from distdl.util.random_text import is_mixed
from distdl.util.secret_shapes import STARS
from distdl.util.secret_values import is_password, is_token

Found = tuple[int, str, str]  # where it is in the text, its kind, and the value
Judge = Callable[[re.Match[str]], bool]
Patterns = list[tuple[bytes, re.Pattern[str]]]

PASSWORD, TOKEN = "a password of a command", "a token of a command"
_PATTERN = {
    "VALUE": r"[\"']?(?P<value>[^\s\"'|;&<>]{4,})",
    "OPTION": r"[\"']?(?P<value>[^\s\"'|;&<>-][^\s\"'|;&<>]{3,})",  # no further option
    "QUOTED": r"[\"'](?P<value>[^\s\"']{4,200})[\"']",
    "ARGUMENT": r"(?:[\w.]{1,40}\s*=\s*)?(?:[a-z]{0,2}\"[^\"\n]{0,200}\"|'[^'\n]{0,200}'|[\w.]{1,80})\s*,\s*",
    "REST": r"[^\n|;]{0,300}?\s",  # of the command
}


def _compiled(table: str) -> Patterns:
    """For each line of a table, its needle and its pattern."""
    patterns: Patterns = []
    for line in filter(None, map(str.strip, table.splitlines())):
        needle, pattern = line.split(maxsplit=1)
        for name, text in _PATTERN.items():
            pattern = pattern.replace(f"<{name}>", text)
        patterns.append((needle.replace("_", " ").encode(), re.compile(pattern)))
    return patterns


# The option takes nothing but a password, so that any word is one.
_CERTAIN = _compiled(r"""
    curl          \bcurl\b<REST>(?:-u|-U|--user|--proxy-user)[ =]?[\"']?[\w.@\\-]+:<VALUE>
    mc_           \bmc\s+(?:alias\s+set|config\s+host\s+add)\s+\S+\s+\S+\s+\S+\s+<VALUE>
    sshpass       \bsshpass\s+-p[ ]?<VALUE>
    lftp          \blftp\b<REST>-u[ ]?[\"']?[\w.@-]+,<VALUE>
    smb           \bsmb\w*\b<REST>(?:-U|--user)[ =]?[\"']?[\w.@\\/-]+%<VALUE>
    -pw           \b(?:plink|pscp|psftp|putty|kitty|winscp)\b[^\n]{0,300}?\s-pw\s+<VALUE>
    net_use       (?i)\bnet\s+use\s[^\n]{0,200}?\\\\\S+\s+(?!/|\*)<VALUE>[^\n]{0,40}?/user:
    net_use       (?i)\bnet\s+use\s[^\n]{0,200}?/user:\S+\s+(?!/|\*)<VALUE>
    net_user      (?i)\bnet\s+user\s+\S+\s+(?!/|\*)<VALUE>[^\n]{0,80}?/add
    /pass         (?i)\s/pass(?:word)?:<VALUE>
    /p:           (?i)freerdp\b<REST>/p:<VALUE>
    convertto-s   (?i)ConvertTo-SecureString(?:\s+-(?:AsPlainText|Force|String))*\s+<QUOTED>
    chpasswd      \b(?:echo|printf)\s+(?:-\w\s+)?[\"']?[\w.-]+:<VALUE>[\"']?\s*\|\s*(?:sudo\s+)?chpasswd
    echo          \becho\s+(?:-n\s+)?<VALUE>[\"']?\s*\|\s*(?:sudo -S|\w*vncpasswd|passwd --stdin|kinit|cryptsetup|smbpasswd|\w+ login\b[^\n|]{0,100}--password-stdin)
    <<<           \b(?:sudo -S|kinit|su|vncpasswd|passwd|login)\b[^\n|;]{0,80}?<<<\s*<VALUE>
    assword       (?i)assword[^\n]{0,40}\n?[^\n]{0,40}?\bsend(?:_?line)?\b\s*\(?(?:\s*--)?\s*[\"'](?P<value>[^\s\"'\\]{4,})
    pass:         \s-pass(?:in|out)?\s+pass:<VALUE>
    7z            \b7z[ar]?\b<REST>-(?:h?p|P\s*)<OPTION>
    rar_          \b(?:un)?rar\b<REST>-(?:h?p|P\s*)<OPTION>
    zip_-         \b(?:un)?zip\b<REST>-(?:h?p|P\s*)<OPTION>
    keytool       \bkeytool\b[^\n]{0,300}?\s-{1,2}(?:store|key|src|dest|deststore|srcstore|ks-|key-)-?pass\s+(?:pass:)?<VALUE>
    jarsigner     \bjarsigner\b[^\n]{0,300}?\s-{1,2}(?:store|key|src|dest|deststore|srcstore|ks-|key-)-?pass\s+(?:pass:)?<VALUE>
    apksigner     \bapksigner\b[^\n]{0,300}?\s-{1,2}(?:store|key|src|dest|deststore|srcstore|ks-|key-)-?pass\s+(?:pass:)?<VALUE>
    rootpw        (?m)^\s*rootpw\s+(?:--plaintext\s+)?(?!--)<VALUE>
    requirepass   (?m)(?:^[ \t]*|--)requirepass(?:[ \t=]+|[\"'],\s*)<VALUE>
    masterauth    (?m)(?:^[ \t]*|--)masterauth(?:[ \t=]+|[\"'],\s*)<VALUE>
    identified    (?i)\bidentified\s+by\s+[\"'](?P<value>[^\s\"']{4,})[\"']
    passw         (?i)\b(?:user|role|login)\s+\S+\s+(?:with\s+)?(?:encrypted\s+)?password\s*=?\s*<QUOTED>
    secret        (?m)^[ \t]*(?:enable|username \S+(?: privilege \d+)?)[ \t]+(?:secret|password)[ \t]+(?:\d[ \t]+)?<VALUE>
""")
# The option may take something else in another program.
_LIKELY = _compiled(r"""
    -u            (?:\s-u|--user)[ =][\"']?[\w.@-]+:<VALUE>
    mysql         \bmysql\w*\b[^\n|;]{0,200}?\s-p<OPTION>
    mongo         \bmongo\w*\b<REST>-p\s*<OPTION>
    redis         \bredis-cli\b<REST>(?:-a|--pass)\s+<OPTION>
    ldap          \bldap(?:search|add|modify|delete|passwd|whoami)\b<REST>-w\s*<OPTION>
    sql           \b(?:sqlplus|sqlldr|expdp|impdp|rman)\b<REST>[\"']?\w+/(?P<value>[^\s\"'@/]{4,})@
    sqlcmd        \bsqlcmd\b<REST>-(?:P|A|X)\s*<OPTION>
    bcp           \bbcp\b<REST>-(?:P|A|X)\s*<OPTION>
    ipmitool      \bipmitool\b<REST>-(?:P|A|X)\s*<OPTION>
    mosquitto     \bmosquitto_\w+\b<REST>-(?:P|A|X)\s*<OPTION>
    snmp          \bsnmp\w+\b<REST>-(?:P|A|X)\s*<OPTION>
    login         \blogin\b[^\n]{0,120}?\s-p[ =]?<OPTION>
    twine         \btwine\b<REST>-p\s*<OPTION>
    htpasswd      \bhtpasswd\b\s+-\w*b\w*\s+\S+\s+[\w.@-]+\s+<OPTION>
    http-basic    \bhttp-basic\.\S+\s+[\w.@-]+\s+<OPTION>
    nmcli         \bnmcli\b<REST>(?:password|wifi-sec\.psk|802-11-wireless-security\.psk)\s+<OPTION>
    obscure       \brclone\s+obscure\s+<OPTION>
    passw         (?i)(?<=-)passw(?:or)?d[ =]<OPTION>
    passphrase    (?i)(?<=-)passphrase[ =]<OPTION>
    pw            [;,][ \t]*(?:Pwd|pwd|PWD)[ \t]*=[ \t]*(?P<value>[^;,\s\"'()]{4,})
    pass          (?i)\b(?:user(?:name| id)?|uid)\s*=\s*\S{1,60}?[ ;&]{1,3}(?:\w{1,20}=\S{1,60} )?pass(?:word|wd)?\s*=\s*(?P<value>[^\s;,\"'()&]{4,})
    passw         [;,][ \t]*(?i:password)[ \t]*=[ \t]*(?P<value>[^;,\s\"'()]{4,})
    passw         (?m)^[ \t]*(?:password|passwd)[ \t]+[\"']?(?P<value>[^\s\"'=:]{4,})[\"']?[ \t]*$
    passw         (?i)passw(?:or)?d[ \t]+[\"'](?P<value>[^\s\"']{4,})[\"']
    pass          (?im)^[ \t]*set[ \t]+\w{0,20}pass(?:word|wd|phrase)?[ \t]*[= \t][ \t]*<VALUE>
    password(     (?im)(?<!\w)(?:set_?|with_?|use_?)?password\(\s*<QUOTED>
    password(     (?im)\b(?:set|with|use)_?(?:user_?)?password\(\s*(?:<ARGUMENT>)?<QUOTED>
    d-i           (?m)^d-i\s+passwd/\S+\s+password\s+<VALUE>
    @             (?m)^\[?[\w.-]+\]?(?::\d+)?[ \t]+[\w.+-]+(?:@[\w.-]+)?:(?P<value>[^\s:/]{4,})[ \t]*\r?$
    auth          (?im)^[ \t\"'-]*[\w-]*(?:auth|userpwd|basic)[\w-]*[\"']?[ \t]*[:=][ \t]*[\"']?[\w.@-]+:(?P<value>[^\s\"':/]{4,})
""")
# A positional argument of a call, after the user and perhaps a host and a database.
_ARGUMENTS = _compiled(r"""
    login         (?i)log_?in\(\s*<ARGUMENT><QUOTED>
    auth          (?i)(?:(?:basic|digest|ntlm|passwd?|password|proxy|user)_?auth\w{0,20}|authenticate|authentication)\(\s*<ARGUMENT><QUOTED>
    auth          (?i)auth\w{0,12}[\"']?\s*[=:]\s*[(\[]{1,2}\s*[\"'][^\"'\n]{1,80}[\"']\s*,\s*<QUOTED>
    cred          (?i)cred(?:ential)?s?\w{0,10}(?:\s*=\s*)?[(\[]\s*(?:<ARGUMENT>)?[\"'][^\"'\n]{1,80}[\"']\s*,\s*<QUOTED>
    account       (?i)(?:create|add|new)_?account\(\s*<ARGUMENT><QUOTED>
    user(         (?i)(?:create|add|new)_?(?:super)?user\(\s*<ARGUMENT>(?:<ARGUMENT>)?<QUOTED>
    connect       (?i)connect(?:ion)?\(\s*<ARGUMENT><ARGUMENT>(?:<ARGUMENT>){0,2}<QUOTED>
    jwt           (?i)\bjw[ts]\.(?:en|de)code\(\s*[^()\n]{1,120}?,\s*<QUOTED>
    database      (?i)\bdatabase\(\s*<ARGUMENT><ARGUMENT><QUOTED>
    sql           (?i)\b(?:mysqli|pdo|mysql)\w{0,12}\(\s*<ARGUMENT><ARGUMENT><QUOTED>
    ftp           (?i)\bs?ftp\w{0,8}\(\s*<ARGUMENT><ARGUMENT><QUOTED>
""")
_TOKENS = _compiled(r"""
    login         \blogin\b[^\n|;()=]{0,60}?\s[\"']?(?P<value>[\w.+/-]{20,})
    auth          \bauth\b[^\n|;()=]{0,60}?\s[\"']?(?P<value>[\w.+/-]{20,})
    token         (?<=-)token[ =][\"']?(?P<value>[\w.+/=-]{10,})
    key           (?<=-)(?:api|access|secret|account)[_-]?key[ =][\"']?(?P<value>[\w.+/=-]{10,})
    secret        (?<=-)secret[ =][\"']?(?P<value>[\w.+/=-]{10,})
    cookies       (?i)\bcookies\w{0,12}\s*=\s*\{\s*[\"'][^\"'\n]{1,60}[\"']\s*:\s*[\"'](?P<value>[\w.+/=%-]{16,})[\"']
    kaggle        \bkaggle\b<REST>-n\s+key\s+-v\s+[\"']?(?P<value>[\w.+/=-]{20,})
    pypi-token    \bpypi-token\.\S+\s+(?P<value>[\w.+/=-]{20,})
    secret        (?m)^[ \t]*secret[ \t]+\"?(?P<value>[A-Za-z0-9+/]{20,}={0,2})\"?[ \t]*;?[ \t]*\r?$
    privatekey    (?m)^PrivateKey:[ \t]*(?P<value>[A-Za-z0-9+/]{20,}={0,2})
    _set_         \bconfig\w*\s+set\s+(?:\S+\s+)?\S*(?i:key|token|secret)\S*\s+[\"']?(?P<value>[\w.+/=-]{20,})
""")
# A client's first argument, where it can only be a key: letters of both cases and digits in turn.
_KEYS = _compiled(r"""
    (             \(\s*[\"'](?P<value>[\w-]{20,128})[\"']
""")
_CLIENT = re.compile(
    r"(?:login|auth|init|experiment|client|api|roboflow|token|credentials?|connect|configure|session|bot|sdk)"
    r"\w{0,12}\Z",
    re.IGNORECASE,
)


# A command as a program writes it: ["curl", "-u", "me:..."].
_OPTION = re.compile(r",\s*f?[\"']-")
_BETWEEN = re.compile(r"[\"'],\s*f?[\"']")


def is_certain(match: re.Match[str]) -> bool:
    return is_password(match["value"], sure=True) and not _is_other(match)


def is_likely(match: re.Match[str]) -> bool:
    around = match.string[max(0, match.start() - 150) : match.end() + 50]
    return is_password(match["value"], around) and not _is_other(match)


def is_mixed_password(match: re.Match[str]) -> bool:
    return is_password(match["value"]) and not _is_other(match)


def is_argument(match: re.Match[str]) -> bool:
    """Letters and digits, as no host, path, database or message has them."""
    value = match["value"]
    plain = re.search(r"[/\\:%{}]|^[\w.-]+\.[a-z]{2,4}$|@[\w-]+\.", value)
    return len(value) >= 6 and plain is None and is_password(value) and not _is_other(match)


def is_command_token(match: re.Match[str]) -> bool:
    return is_token(match["value"], "secret")


def is_key(match: re.Match[str]) -> bool:
    if not is_mixed(match["value"]):
        return False
    return _CLIENT.search(match.string[max(0, match.start() - 40) : match.start()]) is not None


def _is_other(match: re.Match[str]) -> bool:
    """Whether it is the user's name once more, as in `elastic:elastic`, or the name of a function
    that is called: `password = askpass("Password")`."""
    if match.string.startswith("(", match.end("value")):
        return True
    before = match.string[max(0, match.start("value") - 40) : match.start("value")]
    return re.search(rf"\b{re.escape(match['value'])}[:,/%]$", before) is not None


_TABLES: list[tuple[Patterns, Judge, str]] = [
    (_CERTAIN, is_certain, PASSWORD),
    (_LIKELY, is_likely, PASSWORD),
    (_ARGUMENTS, is_argument, PASSWORD),
    (_TOKENS, is_command_token, TOKEN),
    (_KEYS, is_key, TOKEN),
]
_NEEDLES = {needle for patterns, _, _ in _TABLES for needle, _ in patterns}


def search(text: str, lowered: bytes, prose: bool, code: bool) -> Iterator[Found]:
    """Secrets on a command line, and among the arguments of a call.

    Args:
        lowered: The text in lower case.
        prose: In a manual, words alone are an example's.
        code: In a program, they may stand in a comment.
    """
    present = {needle for needle in _NEEDLES if needle in lowered}
    if code:
        for start, words in commands(text):
            for _, kind, value in search(words, words.lower().encode(), prose=False, code=False):
                yield start, kind, value
    for patterns, judge, kind in _TABLES:
        judged = judge
        if (judge is is_certain and prose) or (judge is is_likely and (prose or code)):
            judged = is_mixed_password
        for pattern in [pattern for needle, pattern in patterns if needle in present]:
            for match in pattern.finditer(text):
                if judged(match):
                    yield match.start(), kind, match["value"]


def commands(text: str) -> Iterator[tuple[int, str]]:
    """Where a program's lists of a command and its options begin, and the command as it is typed."""
    end = 0
    for option in _OPTION.finditer(text) if '"-' in text or "'-" in text else ():
        if option.start() >= end:
            before = text[max(end, option.start() - 400) : option.start()]
            start = option.start() - len(re.split(r"[(\[]", before)[-1])
            end = option.end() + len(re.split(r"[)\]]", text[option.end() :][:400])[0])
            yield start, _BETWEEN.sub(" ", text[start:end]).replace("\n", " ").strip(" \"'")


def hide(text: str) -> str:
    """Hides secrets on command lines, which exceptions of programs repeat."""
    lowered = text.lower().encode(errors="replace")
    for patterns, judge, _ in _TABLES:
        for needle, pattern in patterns:
            if needle in lowered:
                text = pattern.sub(functools.partial(_hidden, judge), text)
    return text


def _hidden(judge: Judge, match: re.Match[str]) -> str:
    if not judge(match):
        return match[0]
    start, end = (position - match.start() for position in match.span("value"))
    return match[0][:start] + STARS + match[0][end:]
