// A machine for the steps of the manual: a root of its own with this machine's programs, read-only, and an empty /etc, /var and
// /usr/local, where commands run as root. Its network is the machine's, its processes are its own and end with it. It takes
// real root, since its services run as users of their own.
import { chmodSync, cpSync, existsSync, mkdirSync, mkdtempSync, rmSync, symlinkSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { temporaryRoot } from "../gateway/process.ts";

const NAMESPACES = ["unshare", "--mount", "--pid", "--fork", "--kill-child"];

export const canBeRoot =
  process.platform === "linux" &&
  process.getuid?.() === 0 &&
  Bun.spawnSync([...NAMESPACES, "true"], { stderr: "ignore" }).success;

/** The shell gets one line for each script, and what a script starts goes on when it has ended. */
const ENTER = `
root=$1; shift
mount --bind "$root" "$root" &&
mount --rbind -o ro /usr "$root/usr" &&
mount --bind "$root/local" "$root/usr/local" &&
mount --rbind /dev "$root/dev" &&
mount -t proc proc "$root/proc" &&
mount --bind "$1" "$root/release" &&
mount --bind "$2" "$root/opt/bun" &&
mount --bind "$3" "$root/opt/support" &&
PATH=/usr/local/bin:/usr/bin:/usr/sbin exec chroot "$root" /usr/bin/bash -s
`;

export interface Machine extends AsyncDisposable {
  /** Runs a script to its end. What it has started goes on. */
  run(script: string): Promise<{ readonly code: number; readonly printed: string }>;
  /** A directory of it. */
  path(inside: string): string;
}

export function startMachine(release: string): Machine {
  const root = mkdtempSync(join(temporaryRoot(), "machine-"));
  chmodSync(root, 0o755);
  for (const name of [
    "dev",
    "proc",
    "release",
    "opt/support",
    "usr",
    "local/bin",
    "etc/systemd/system",
    "var/lib",
    "var/log",
    "run",
    "tmp",
  ])
    mkdirSync(join(root, name), { recursive: true });
  for (const name of ["bin", "sbin", "lib", "lib64"])
    if (existsSync(`/usr/${name}`)) symlinkSync(`usr/${name}`, join(root, name));
  writeFileSync(join(root, "opt/bun"), "");
  writeFileSync(join(root, "etc/passwd"), "root:x:0:0:root:/:/bin/sh\n");
  writeFileSync(join(root, "etc/group"), "root:x:0:\n");
  writeFileSync(join(root, "etc/shadow"), "root:*:1::::::\n");
  for (const name of ["alternatives", "ld.so.cache", "pam.d", "security", "login.defs"]) {
    if (existsSync(`/etc/${name}`)) cpSync(`/etc/${name}`, join(root, "etc", name), { recursive: true });
  }
  for (const name of ["systemctl", "systemd-run"]) {
    const line = `#!/bin/sh\nexec /opt/bun /opt/support/service-manager.ts ${name} "$@"\n`;
    writeFileSync(join(root, "local/bin", name), line, { mode: 0o755 });
  }
  const command = ["setpriv", "--pdeathsig", "KILL", "--", ...NAMESPACES, "sh", "-c", ENTER, "sh"];
  const shell = Bun.spawn([...command, root, release, process.execPath, import.meta.dir], {
    stdin: "pipe",
    stdout: "pipe",
    stderr: "inherit",
  });
  const output = shell.stdout.pipeThrough(new TextDecoderStream()).getReader();
  let scripts = 0;
  return {
    path: (inside) => join(root, inside),
    async run(script) {
      const name = `script-${++scripts}`;
      writeFileSync(join(root, name), script);
      shell.stdin.write(`cd /release; bash -e /${name} </dev/null 2>&1; echo "${name} ended with $?"\n`);
      shell.stdin.flush();
      for (let printed = ""; ; ) {
        const { value, done } = await output.read();
        if (done) throw new Error(`the machine has ended:\n${printed}`);
        printed += value;
        const [all, code] = new RegExp(`^${name} ended with (\\d+)\n`, "m").exec(printed) ?? [];
        if (all !== undefined) return { code: Number(code), printed: printed.replace(all, "") };
      }
    },
    async [Symbol.asyncDispose]() {
      shell.kill("SIGKILL");
      await shell.exited;
      rmSync(root, { recursive: true, force: true });
    },
  };
}
