// What processes have used so far, as the kernel counts it: time of a core says more than a clock on a machine that has
// other things to do.
import { existsSync, readdirSync, readFileSync, readlinkSync } from "node:fs";

/** USER_HZ, which is 100 on every Linux that Bun runs on. */
const TICKS_PER_SECOND = 100;

export interface Usage {
  /** Seconds of a core. */
  readonly whole: number;
  /** The main thread's share of them. */
  readonly main: number;
  /** Bytes that it has had the kernel write to a disk; none for files in memory. */
  readonly written: number;
}

/** Of this process so far. */
export function usageOf(pid: number): Usage {
  const whole = secondsIn(`/proc/${pid}/stat`, 2);
  const main = secondsIn(`/proc/${pid}/task/${pid}/stat`, 2);
  const written = Number(/^write_bytes: (\d+)/m.exec(readFileSync(`/proc/${pid}/io`, "latin1"))?.[1] ?? 0);
  return { whole, main, written };
}

/** The resident set of a process now. */
export function residentMb(pid: number): number {
  const status = readFileSync(`/proc/${pid}/status`, "latin1");
  return Number(/VmRSS:\s+(\d+)/.exec(status)?.[1] ?? 0) / 1024;
}

const RESIDENT_EVERY_MS = 20;

/**
 * The resident set of a process from now on until it is asked for, in MB. One look would tell nothing: under load it swings by
 * half, as garbage is collected once or twice a second.
 */
export function residentOver(pid: number): () => { readonly mean: number; readonly least: number } {
  const seen = [residentMb(pid)];
  const timer = setInterval(() => existsSync(`/proc/${pid}`) && seen.push(residentMb(pid)), RESIDENT_EVERY_MS);
  timer.unref();
  return () => {
    clearInterval(timer);
    return { mean: seen.reduce((sum, each) => sum + each, 0) / seen.length, least: Math.min(...seen) };
  };
}

/** Seconds of this process so far. */
export function ownCoreSeconds(): number {
  const { user, system } = process.cpuUsage();
  return (user + system) / 1e6;
}

/** Seconds so far of the processes that work in this directory, and of their children that are gone. */
export function coreSecondsIn(directory: string): number {
  let seconds = 0;
  for (const pid of readdirSync("/proc").filter((name) => /^\d+$/.test(name))) {
    try {
      if (readlinkSync(`/proc/${pid}/cwd`) === directory) seconds += secondsIn(`/proc/${pid}/stat`, 4);
    } catch {
      // It is somebody else's, or gone.
    }
  }
  return seconds;
}

/** Fields 14 to 17 (proc(5)), counted from the third, which follows the command's name in brackets: own, then children's. */
function secondsIn(path: string, fields: 2 | 4): number {
  const text = readFileSync(path, "latin1");
  const all = text
    .slice(text.lastIndexOf(") ") + 2)
    .split(" ")
    .slice(11, 11 + fields);
  return all.reduce((sum, each) => sum + Number(each), 0) / TICKS_PER_SECOND;
}
