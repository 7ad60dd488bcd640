// Dial-time resolution: a host name becomes the addresses that may be dialled, or a reason why not. The very answers that
// were judged are dialled, so a name that changes its answers later (DNS rebinding, SSRF) gains nothing.

import { networkInterfaces } from "node:os";
import {
  type Address,
  type HostRules,
  isDeniedName,
  literalAddress,
  localAddresses,
  mayDial,
  parseAddress,
} from "../../core/host.ts";
import { StartupProblem } from "../../core/startup.ts";
import { tenantCache } from "../../kernel/cache.ts";
import { MAX } from "../../kernel/limits.ts";
import { createLimiter } from "../../kernel/share.ts";
import { afterShared } from "../../kernel/turns.ts";
import { withDeadline } from "../../kernel/wait.ts";

/** All addresses of a name; rejects when it has none. */
export type Lookup = (name: string) => Promise<ReadonlyArray<{ readonly address: string }>>;

export type Resolution =
  | { readonly ok: true; readonly addresses: readonly string[] }
  | { readonly ok: false; readonly kind: "blocked" | "unreached"; readonly detail: string };

export interface ResolveOptions {
  /** Null for the operator's own servers: any address will do. */
  readonly rules: HostRules | null;
  readonly lookup?: Lookup | undefined;
  readonly lookupTimeoutMs?: number;
  /** How long good answers are used again. */
  readonly cacheMs?: number;
}

/**
 * /etc/hosts and the resolv.conf read at the start apply, search domains too. The C library's getaddrinfo would block one
 * of a handful of threads, which file access shares, for as long as a name server is silent: four such names would stop
 * all others. Bun uses it anyway for names under .local, unless they are in capitals, which make no difference in names.
 */
const systemLookup: Lookup = (name) => Bun.dns.lookup(name.replace(/\.local$/, ".LOCAL"), { backend: "c-ares" });

/** A short word for the log: the message of a resolver error may say more than needed. */
function failureName(error: unknown): string {
  if (!(error instanceof Error)) return "failed";
  return "code" in error && typeof error.code === "string" ? error.code.replace(/^DNS_/, "") : error.message;
}

export function createResolver(options: ResolveOptions) {
  const { rules, lookup = systemLookup } = options;
  const { lookupTimeoutMs = 5000, cacheMs = 5000 } = options;
  /** One entry of a name serves all tenants, and counts to the one that asked for it last. */
  const known = tenantCache<string, { readonly resolution: Resolution; readonly until: number }>(MAX.resolvedNames);
  const few = createLimiter({ size: MAX.lookups, tooMany: "too many names are being looked up" });
  /** By tenant, so that no tenant waits behind another one's look-up. */
  const underWay = new Map<string, Promise<Resolution>>();

  function judge(hostname: string, addresses: readonly string[]): Resolution {
    // `every` is true for an empty list, so no addresses at all have to fail separately.
    if (addresses.length === 0) return { ok: false, kind: "unreached", detail: "DNS: no address" };
    const refused = addresses.find((text) =>
      rules === null ? parseAddress(text) === null : !mayDial(hostname, text, rules),
    );
    if (refused === undefined) return { ok: true, addresses };
    return { ok: false, kind: "blocked", detail: `address ${refused} is not allowed` };
  }

  async function lookUp(tenant: string, hostname: string): Promise<Resolution> {
    try {
      const answers = await few(tenant, () =>
        withDeadline(lookupTimeoutMs, lookup(hostname), () => new Error("timed out")),
      );
      return judge(hostname, [...new Set(answers.map((answer) => answer.address))]);
    } catch (error) {
      return { ok: false, kind: "unreached", detail: `DNS: ${failureName(error)}` };
    }
  }

  function remember(tenant: string, hostname: string, resolution: Resolution): void {
    if (!resolution.ok) known.delete(hostname);
    else if (cacheMs > 0) known.set(tenant, hostname, { resolution, until: performance.now() + cacheMs });
  }

  /** To judge an address again takes 10 µs of each call. This machine may get the address meanwhile, so not for ever. */
  function judgeForNow(tenant: string, hostname: string, addresses: readonly string[]): Resolution {
    const resolution = judge(hostname, addresses);
    remember(tenant, hostname, resolution);
    return resolution;
  }

  /** @param tenant for whom; without one it is for the operator */
  return (hostname: string, tenant = ""): Resolution | Promise<Resolution> => {
    const entry = known.get(hostname);
    if (entry !== undefined && performance.now() < entry.until) return entry.resolution;
    const literal = literalAddress(hostname);
    if (literal !== null) return judgeForNow(tenant, hostname, [literal]);
    if (rules !== null && isDeniedName(hostname, rules)) {
      return { ok: false, kind: "blocked", detail: "the name is not allowed" };
    }
    const local = rules && localAddresses(hostname, rules);
    if (local !== null) return judgeForNow(tenant, hostname, local);
    const flight = JSON.stringify([tenant, hostname]);
    const running = underWay.get(flight);
    if (running !== undefined) return afterShared(running, tenant);
    const work = lookUp(tenant, hostname).then((resolution) => {
      underWay.delete(flight);
      remember(tenant, hostname, resolution);
      return resolution;
    });
    underWay.set(flight, work);
    return work;
  };
}

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
 * Returns a function that gives the addresses of this machine's own network interfaces, which come and go while the
 * process runs. They are read again every few seconds; if that fails, the last known ones are used.
 *
 * @throws StartupProblem when the system does not tell them at all
 */
export function ownAddresses(now = () => performance.now()): () => readonly Address[] {
  let known = firstAddresses();
  let readAt = now();
  return () => {
    if (now() - readAt < 5_000) return known;
    readAt = now();
    try {
      known = readAddresses();
    } catch {}
    return known;
  };
}
