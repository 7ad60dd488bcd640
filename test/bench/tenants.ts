// The same accepts by one tenant and by a thousand in turn, at one gateway: what many tenants cost.
import { exportJWK, generateKeyPair, SignJWT } from "jose";
import { startGateway } from "../support/gateway/gateway.ts";
import { DATABASES, type OpenDatabase } from "./databases.ts";
import { accepts, type Target, warmUp } from "./measure.ts";
import type { Report } from "./report.ts";
import { agentRequest, HELD_BACK, portOf, silentUpstream } from "./targets.ts";

const TENANTS = 1_000;
/** Calls that each of them has already, so that no two of them share the pages that their new calls go to. */
const STORED = 50;
const FIRST_SECONDS_MAX = 20;
/** Agents that are created at a time. */
const AT_ONCE = 16;

const ISSUER = "http://issuer.test/";
const AUDIENCE = "bench";
const KEY_ID = "bench";

/** The tokens of so many tenants take a command of the binary each, so an issuer of ours signs them. */
async function startIssuer() {
  const { publicKey, privateKey } = await generateKeyPair("ES256");
  const keys = { keys: [{ ...(await exportJWK(publicKey)), kid: KEY_ID, alg: "ES256", use: "sig" }] };
  const server = Bun.serve({ port: 0, hostname: "127.0.0.1", fetch: () => Response.json(keys) });
  return {
    env: { TOLLGATE_OIDC_ISSUER: ISSUER, TOLLGATE_OIDC_AUDIENCE: AUDIENCE, TOLLGATE_JWKS_URL: server.url.href },
    token: (tenant: string) =>
      new SignJWT({ tenant_id: tenant })
        .setProtectedHeader({ alg: "ES256", kid: KEY_ID })
        .setIssuer(ISSUER)
        .setAudience(AUDIENCE)
        .setSubject("bench")
        .setExpirationTime("1h")
        .sign(privateKey),
    [Symbol.asyncDispose]: () => server.stop(true),
  };
}

/** @param seconds of each load */
export async function manyTenants(seconds: number, report: Report): Promise<void> {
  for (const open of DATABASES) await onDatabase(seconds, report, open);
}

async function onDatabase(seconds: number, report: Report, open: OpenDatabase): Promise<void> {
  const database = await open();
  await using issuer = await startIssuer();
  await using upstream = silentUpstream();
  await using gateway = await startGateway({ env: { ...database.env, ...HELD_BACK, ...issuer.env } });
  const names = Array.from({ length: TENANTS }, (_, index) => `tenant-${index}`);
  await gateway.stop();
  await database.fill(gateway.dataDir, Object.fromEntries(names.map((name) => [name, STORED])));
  await gateway.restart();
  const requests: string[] = [];
  const rest = names.values();
  const create = async () => {
    for (const name of rest) requests.push(await agentRequest(gateway.url, await issuer.token(name), upstream.url));
  };
  await Promise.all(Array.from({ length: AT_ONCE }, create));

  const target: Target = { pid: gateway.pid, port: portOf(gateway.url), database, requests };
  // Each tenant's first call runs, and never ends.
  await accepts(target, { seconds: FIRST_SECONDS_MAX, answersMax: TENANTS });
  const of = async (all: readonly string[]) => {
    const whole = { ...target, requests: all };
    await warmUp(whole);
    return accepts(whole, { seconds });
  };
  const one = await of(requests.slice(0, 1));
  const floor = report.add(`durable accepts of one tenant, ${database.name}`, one.figures, one);
  const many = await of(requests);
  const work = `durable accepts of ${TENANTS} tenants, ${database.name}`;
  const { figures } = report.add(work, many.figures, { floor: [floor, "rate"], note: many.note });
  const { written = 0 } = figures;
  report.add(`bytes written by ${TENANTS} tenants, ${database.name}`, { written }, { floor: [floor, "written"] });
}
