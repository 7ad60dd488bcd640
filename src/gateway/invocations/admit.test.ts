import { afterEach, beforeEach, expect, test } from "bun:test";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { Fault } from "../../core/fault.ts";
import { silentLog } from "../../core/log.ts";
import { createEdge, routes } from "../../edge/http.ts";
import { openStore } from "../../storage/open.ts";
import type { Store } from "../../storage/store.ts";
import type { InvocableAgent } from "../agents/service.ts";
import type { Payments } from "../payment/service.ts";
import { createEndings, type Endings } from "./endings.ts";
import { invocationRoutes } from "./routes.ts";
import type { Accepted } from "./service.ts";

const clock = { now: () => 1_790_000_000_000 };
const AGENT: InvocableAgent = {
  id: "agt_019aa4d2-7c1e-7b54-9d0f-3f0b6c1d2e3f",
  upstream_url: "https://example.com/",
  credential_ref: null,
  suspended: false,
  invocation_rate_limit: null,
  invocation_burst: null,
  rate_revision: 0,
  emit_receipts: false,
  capture_body: true,
  protocol: "http",
  mcp_protocol_version: null,
  pricing: null,
  deleted_at: null,
};

let dir: string;
let real: Store;
beforeEach(async () => {
  dir = mkdtempSync(join(tmpdir(), "tollgate-admit-"));
  real = await openStore({ databaseUrl: null, dataDir: dir, log: silentLog, clock });
});
afterEach(async () => {
  await real.close();
  rmSync(dir, { recursive: true, force: true });
});

/** Of agents that cost nothing. */
const payments: Payments = {
  check: async () => ({ kind: "free" }),
  paymentRow() {
    throw new Error("there is no payment");
  },
  settle: async () => ({}),
  recall: async () => ({}),
};

const noPolicy = { judge: async () => null };

async function call(store: Store, endings: Endings, headers: Record<string, string> = {}) {
  const offered: Accepted[] = [];
  const app = routes().use(
    invocationRoutes({
      store,
      clock,
      endings,
      payments,
      policy: noPolicy,
      findAgent: async () => AGENT,
      takeToken: () => null,
      offer: (accepted) => void offered.push(accepted),
      stop() {},
    }),
  );
  const caller = { tenant: "acme", user: "alice", scopes: new Set<string>() };
  const edge = createEdge({ app, log: silentLog, authenticate: () => caller });
  const request = new Request(`http://localhost/v1/proxy/${AGENT.id}`, {
    method: "POST",
    body: "hello",
    headers,
  });
  return { response: await edge.fetch(request), offered };
}

const lost = () => new Fault("unavailable", "the store cannot take a write now", { retryAfterSeconds: 5 });

test("an accept that was stored without an answer is a 202, and its call is made", async () => {
  const store: Store = {
    ...real,
    async write(work) {
      await real.write(work);
      throw lost();
    },
  };
  const { response, offered } = await call(store, createEndings());
  expect(response.status).toBe(202);
  const { invocation_id } = (await response.json()) as { invocation_id: string };
  expect(offered.map(({ row }) => row.id)).toEqual([invocation_id]);
});

test("an accept that was not stored is a 503, and nothing is offered", async () => {
  const store: Store = { ...real, write: () => Promise.reject(lost()) };
  const { response, offered } = await call(store, createEndings());
  expect([response.status, response.headers.get("retry-after")]).toEqual([503, "5"]);
  expect(offered).toEqual([]);
});

test("a wait that fails takes nothing back of the accept", async () => {
  const endings = { ...createEndings(), wait: () => Promise.reject(lost()) };
  const { response } = await call(real, endings, { prefer: "wait=5" });
  expect(response.status).toBe(202);
  expect(response.headers.get("x-service-invocation-id")).toStartWith("inv_");
});
