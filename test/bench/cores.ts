// Time of a core that processes have used, which says more than a clock on a machine that has other things to do.
import { readdirSync, readFileSync, readlinkSync } from "node:fs";

/** USER_HZ, which is 100 on every Linux that Bun runs on. */
const TICKS_PER_SECOND = 100;

/** Seconds of this process so far. */
export function ownCoreSeconds(): number {
  const { user, system } = process.cpuUsage();
  return (user + system) / 1e6;
}

/** Seconds so far of the processes that work in this directory. */
export function coreSecondsIn(directory: string): number {
  let ticks = 0;
  for (const pid of readdirSync("/proc").filter((name) => /^\d+$/.test(name))) {
    try {
      if (readlinkSync(`/proc/${pid}/cwd`) === directory) ticks += ticksOf(pid);
    } catch {
      // It is somebody else's, or gone.
    }
  }
  return ticks / TICKS_PER_SECOND;
}

/** Fields 14 and 15 (proc(5)), counted from the third, which follows the command's name in brackets. */
function ticksOf(pid: string): number {
  const [, fields = ""] = readFileSync(`/proc/${pid}/stat`, "latin1").split(") ");
  const [user = 0, system = 0] = fields.split(" ").slice(11, 13).map(Number);
  return user + system;
}
