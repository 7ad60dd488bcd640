// The addresses of this machine's own network interfaces, which come and go while the process runs.
import { networkInterfaces } from "node:os";
import { type Address, parseAddress } from "../core/network.ts";

const KNOWN_MS_MAX = 5_000;

function readAddresses(): Address[] {
  const listed = Object.values(networkInterfaces()).flatMap((addresses = []) => addresses);
  return listed.flatMap(({ address }) => parseAddress(address.replace(/%.*$/, "")) ?? []);
}

/**
 * A function that gives them, read anew every few seconds.
 *
 * @throws Error when the system does not tell them; later on the last known ones stand then
 */
export function ownAddresses(now = () => performance.now()): () => readonly Address[] {
  let known = readAddresses();
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
