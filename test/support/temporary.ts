// Where tests keep their databases and files.
import { mkdtempSync, readFileSync, rmSync, statfsSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const MEMORY = "/dev/shm";
/** Many times what a run needs, so that nobody else on the machine misses it. */
const FREE_BYTES_MIN = 8 * 1024 ** 3;

let place: string | undefined;

/**
 * A directory in memory where there is enough of it, and else the temporary directory: a disk costs tests of the store a tenth to
 * a fourth of their processor time (measured), and no machine fails under them. Benchmarks and whoever sets TMPDIR get the disk.
 */
export function temporaryPlace(): string {
  const isTest = process.env.NODE_ENV === "test" && process.env["TMPDIR"] === undefined;
  place ??= isTest && isRoomy() ? MEMORY : tmpdir();
  return place;
}

function isRoomy(): boolean {
  try {
    const { bavail, bsize } = statfsSync(MEMORY);
    const available = 1024 * Number(/^MemAvailable: +(\d+) kB$/m.exec(readFileSync("/proc/meminfo", "utf8"))?.[1]);
    return Math.min(bavail * bsize, available) >= FREE_BYTES_MIN && mayRun();
  } catch {
    return false;
  }
}

/** Containers often let no program in memory run, and some tests make programs. */
function mayRun(): boolean {
  const dir = mkdtempSync(join(MEMORY, "tollgate-run-"));
  const script = join(dir, "script");
  writeFileSync(script, "#!/bin/sh\n", { mode: 0o755 });
  const { success } = Bun.spawnSync([script]);
  rmSync(dir, { recursive: true });
  return success;
}
