// The addresses of this machine's own network interfaces, which come and go while the process runs.
import { networkInterfaces } from "node:os";
import { type Address, parseAddress } from "../core/ip-ranges.ts";
import { StartupProblem } from "../core/startup.ts";

const KNOWN_MS_MAX = 5_000;

function readAddresses(): Address[] {
  const listed = Object.values(networkInterfaces()).flatMap((addresses = []) => addresses);
  return listed.flatMap(({ address }) => parseAddress(address.replace(/%.*$/, "")) ?? []);
}

function firstAddresses(): Address[] {
  try {
    return readAddresses();
  } catch (cause) {
    throw new StartupProblem("the network interfaces of this machine must be readable", { cause });
  }
}

/**
 * Returns a function that gives them, read anew every few seconds. If that fails, the last known ones are used.
 *
 * @throws StartupProblem when the system does not tell them at all
 */
export function ownAddresses(now = () => performance.now()): () => readonly Address[] {
  let known = firstAddresses();
  let readAt = now();
  return () => {
    if (now() - readAt < KNOWN_MS_MAX) return known;
    readAt = now();
    try {
      known = readAddresses();
    } catch {}
    return known;
  };
}
