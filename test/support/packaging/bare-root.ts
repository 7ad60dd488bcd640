// A container without an engine: a root that has the binary, the libraries that it is linked with and bash, all of it read-only
// but one directory, and in it a process that is nobody, is the first of its own process table and sees no other file.
// Made by namespaces of the kernel, which any user may have. Only the network is the machine's.
import { copyFileSync, existsSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { tollgateBinary } from "../gateway/binary.ts";
import { temporaryRoot } from "../gateway/process.ts";

/** Within the outer namespace the process is root, so that it may mount. Then it becomes the user, and keeps no right. */
const ENTER = `
root=$1; shift; user=$1; shift; binary=$1; shift; data=$1; shift
mount --bind "$root" "$root" &&
mount --bind "$binary" "$root/usr/local/bin/tollgate" &&
mount --bind "$data" "$root/data" &&
mount --bind /dev/null "$root/dev/null" &&
mount -t proc -o ro,subset=pid proc "$root/proc" &&
for each in "$root" "$root/usr/local/bin/tollgate"; do mount -o remount,bind,ro "$each" || exit 99; done &&
exec unshare --user --map-user="$user" --map-group="$user" --root="$root" --wd=/data -- "$@"
`;
const NAMESPACES = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child"];

/** Whether this machine lets its users have namespaces. */
export const hasNamespaces =
  process.platform === "linux" && Bun.spawnSync([...NAMESPACES, "true"], { stderr: "ignore" }).success;

export interface BareRoot extends Disposable {
  /** The command that runs the words after it inside. */
  enter(user: string): string[];
  /** Mounted at /data. */
  readonly data: string;
}

/** @param files more of them: where from, by where they are inside */
export function bareRoot(files: Readonly<Record<string, string>> = {}): BareRoot {
  const home = mkdtempSync(join(temporaryRoot(), "root-"));
  const [root, data] = [join(home, "root"), join(home, "data")];
  for (const name of ["data", "dev", "proc", "usr/local/bin"]) mkdirSync(join(root, name), { recursive: true });
  mkdirSync(data, { mode: 0o700 });
  for (const name of ["dev/null", "usr/local/bin/tollgate"]) writeFileSync(join(root, name), "");
  const put = (from: string, to: string) => {
    mkdirSync(dirname(join(root, to)), { recursive: true });
    copyFileSync(from, join(root, to));
  };
  for (const path of [...libraries(tollgateBinary()), ...libraries("/bin/bash"), "/bin/bash"]) put(path, path);
  for (const [to, from] of Object.entries(files)) put(from, to);
  return {
    data,
    enter: (user) => [...NAMESPACES, "sh", "-c", ENTER, "sh", root, user, tollgateBinary(), data],
    [Symbol.dispose]: () => rmSync(home, { recursive: true, force: true }),
  };
}

/** As the loader finds them, and the loader itself. */
function libraries(program: string): string[] {
  const { stdout } = Bun.spawnSync(["ldd", program], { stderr: "ignore" });
  return [...new Set(stdout.toString().match(/(?<=\s)\/\S+(?= \()/g))];
}

/** The process that was started inside: the one child of the command that entered. */
export function insidePid(outside: number): number {
  let pid = outside;
  while (existsSync(`/proc/${pid}/task/${pid}/children`)) {
    const [child] = readFileSync(`/proc/${pid}/task/${pid}/children`, "utf8").match(/\d+/g) ?? [];
    if (child === undefined) return pid;
    pid = Number(child);
  }
  return pid;
}

/** Runs something beside it, as `docker exec` does. */
export async function execute(pid: number, env: Readonly<Record<string, string>>, words: readonly string[]) {
  const into = ["nsenter", `--target=${pid}`, "--user", "--mount", "--pid", "--root", "--wd", "--preserve-credentials"];
  const child = Bun.spawn([...into, "--", ...words], {
    env: { ...env },
    stdout: "pipe",
    stderr: "pipe",
    stdin: "ignore",
  });
  const [stdout, stderr] = await Promise.all([child.stdout.text(), child.stderr.text()]);
  return { code: await child.exited, stdout, stderr };
}
