// What stands for systemd in the machine of machine.ts: `systemctl` and `systemd-run`, as far as the manual uses them, for the
// units as they are. It makes their directories, credentials and environment, and starts them as their user without any
// capability. It does not confine them further: `systemd-analyze` judges that, where it is. Runs inside, and writes as root.
import {
  chmodSync,
  chownSync,
  cpSync,
  existsSync,
  mkdirSync,
  openSync,
  readdirSync,
  readFileSync,
  rmSync,
  writeFileSync,
} from "node:fs";
import { join } from "node:path";
import { parseUnit, type Unit } from "./unit.ts";

const UNITS = "/etc/systemd/system";

function ids(user: string): [number, number] {
  const line = readFileSync("/etc/passwd", "utf8")
    .split("\n")
    .find((each) => each.startsWith(`${user}:`));
  const [, , uid, gid] = line?.split(":") ?? [];
  if (uid === undefined || gid === undefined) throw new Error(`there is no user ${user}`);
  return [Number(uid), Number(gid)];
}

/** The words of its command, behind what makes them the user's. */
function prepare(name: string, unit: Unit): { command: string[]; env: Record<string, string> } {
  const user = unit.one("User");
  const [uid, gid] = ids(user);
  const own = (path: string, mode: number) => {
    chownSync(path, uid, gid);
    chmodSync(path, mode);
  };
  for (const state of unit.all("StateDirectory")) {
    mkdirSync(join("/var/lib", state), { recursive: true });
    own(join("/var/lib", state), Number.parseInt(unit.one("StateDirectoryMode"), 8));
  }
  const credentials = join("/run/credentials", name);
  mkdirSync(credentials, { recursive: true });
  for (const each of unit.all("LoadCredential")) {
    const [id = "", from = ""] = each.split(":");
    cpSync(from, join(credentials, id));
    own(join(credentials, id), 0o400);
  }
  own(credentials, 0o500);
  const env: Record<string, string> = { PATH: "/usr/local/bin:/usr/bin", USER: user };
  const assign = (text: string) => {
    const [, variable, value] = /^(\w+)=(.*)$/.exec(text.trim()) ?? [];
    if (variable !== undefined) env[variable] = value ?? "";
  };
  for (const text of unit.all("Environment"))
    for (const each of text.split(" ")) assign(each.replaceAll("%d", credentials));
  for (const path of unit.all("EnvironmentFile")) readFileSync(path, "utf8").split("\n").forEach(assign);
  const drop = ["setpriv", `--reuid=${uid}`, `--regid=${gid}`, "--clear-groups", "--no-new-privs"];
  const none = ["--bounding-set=-all", "--inh-caps=-all"];
  return { command: [...drop, ...none, ...unit.one("ExecStart").split(" ")], env };
}

const pidFile = (name: string) => join("/run", `${name}.pid`);

/** With what stands beside it in a directory of its name. */
function unitOf(name: string): Unit {
  const more = join(UNITS, `${name}.d`);
  const files = [join(UNITS, name), ...(existsSync(more) ? readdirSync(more).map((each) => join(more, each)) : [])];
  return parseUnit(files.map((path) => readFileSync(path, "utf8")).join("\n"));
}

function start(name: string): void {
  const { command, env } = prepare(name, unitOf(name));
  const log = openSync(join("/var/log", `${name}.log`), "a");
  const child = Bun.spawn(command, { env, cwd: "/", stdin: "ignore", stdout: log, stderr: log });
  writeFileSync(pidFile(name), String(child.pid));
  child.unref();
}

async function stop(name: string): Promise<void> {
  const pid = Number(readFileSync(pidFile(name), "utf8"));
  process.kill(pid, "SIGTERM");
  const isThere = () => {
    try {
      // A zombie has ended: nobody here waits for it.
      return !/^State:\tZ/m.test(readFileSync(`/proc/${pid}/status`, "utf8"));
    } catch {
      return false;
    }
  };
  while (isThere()) await Bun.sleep(20);
  rmSync(pidFile(name));
}

async function systemctl([verb, ...words]: readonly string[]): Promise<void> {
  const names = words.filter((word) => word !== "--now").map((word) => (word.includes(".") ? word : `${word}.service`));
  switch (verb) {
    case "daemon-reload":
      return;
    case "enable":
      return names.forEach(start);
    case "disable":
      for (const name of names) await stop(name);
      return;
    case "restart":
      for (const name of names) await stop(name);
      return names.forEach(start);
    default:
      throw new Error(`systemctl ${verb} is not known here`);
  }
}

/** With what it is given in place of a unit. */
function systemdRun(words: readonly string[]): never {
  const lines: string[] = ["[Service]"];
  let name = "run";
  let index = 0;
  for (; words[index]?.startsWith("-"); index++) {
    const word = words[index] ?? "";
    if (word === "-p") lines.push(words[++index] ?? "");
    else if (word === "-E") lines.push(`Environment=${words[++index]?.replace(/\/run\/credentials\/[^/]+/, "%d")}`);
    else if (word.startsWith("--unit=")) name = word.slice("--unit=".length);
    else if (!["--pipe", "--wait", "--quiet"].includes(word)) throw new Error(`systemd-run ${word} is not known here`);
  }
  lines.push(`ExecStart=${words.slice(index).join(" ")}`);
  const { command, env } = prepare(`${name}.service`, parseUnit(lines.join("\n")));
  const { exitCode } = Bun.spawnSync(command, { env, cwd: "/", stdin: "ignore", stdout: "inherit", stderr: "inherit" });
  process.exit(exitCode);
}

// As systemd's, whatever the shell has that asks.
process.umask(0o022);
const [program, ...words] = process.argv.slice(2);
if (program === "systemd-run") systemdRun(words);
await systemctl(words);
