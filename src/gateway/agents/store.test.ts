import { afterEach, beforeEach, expect, test } from "bun:test";
import { type Catalog, fresh, openCatalog, UPSTREAM_URL } from "../../../test/support/stores/catalog.ts";
import { createAgentCache } from "./store.ts";

let catalog: Catalog;
beforeEach(async () => {
  catalog = await openCatalog();
});
afterEach(() => catalog[Symbol.asyncDispose]());

const create = async () => (await catalog.send("POST", "/v1/agents", fresh({ upstream_url: UPSTREAM_URL }))).body.id;
const suspend = (id: string) => catalog.send("PATCH", `/v1/agents/${id}`, { suspended: true });

test("an agent is read once while it is remembered, and anew after that", async () => {
  let time = 0;
  const agents = createAgentCache(catalog.store, () => time);
  const id = await create();
  const first = await agents.find("acme", id);
  expect(first).toMatchObject({ id, suspended: false });
  await suspend(id);
  time = 999;
  expect(await agents.find("acme", id)).toBe(first);
  time = 1000;
  expect(await agents.find("acme", id)).toMatchObject({ suspended: true });
});

test("a change that is told is seen at once, also by a reader that was under way", async () => {
  const agents = createAgentCache(catalog.store);
  const id = await create();
  await agents.find("acme", id);
  await suspend(id);
  agents.forget("acme", id);
  expect(await agents.find("acme", id)).toMatchObject({ suspended: true });

  const other = await create();
  const underWay = agents.find("acme", other);
  await new Promise(setImmediate);
  agents.forget("acme", other);
  await underWay;
  await suspend(other);
  expect(await agents.find("acme", other)).toMatchObject({ suspended: true });
});

test("a remembered agent is another tenant's to nobody else", async () => {
  const agents = createAgentCache(catalog.store);
  const id = await create();
  expect(await agents.find("acme", id)).not.toBeNull();
  expect(await agents.find("rival", id)).toBeNull();
  expect(await agents.find("acme", id)).not.toBeNull();
});

test("a change of one agent forgets no other one, nor what is being read of it", async () => {
  const agents = createAgentCache(catalog.store);
  const [kept, changed, read] = [await create(), await create(), await create()];
  const first = await agents.find("acme", kept);
  await agents.find("acme", changed);
  const underWay = agents.find("acme", read);
  agents.forget("acme", changed);
  expect(await agents.find("acme", kept)).toBe(first);
  const seen = await underWay;
  expect(seen).toMatchObject({ id: read });
  expect(await agents.find("acme", read)).toBe(seen);
});

test("readers at one moment share a read, and one that comes after a change has it as it is then", async () => {
  const agents = createAgentCache(catalog.store);
  const id = await create();
  const [first, joined] = await Promise.all([agents.find("acme", id), agents.find("acme", id)]);
  expect(joined).toBe(first);
  agents.forget("acme", id);
  const underWay = agents.find("acme", id);
  await new Promise(setImmediate);
  await suspend(id);
  agents.forget("acme", id);
  expect(await agents.find("acme", id)).toMatchObject({ suspended: true });
  await underWay;
  expect(await agents.find("acme", id)).toMatchObject({ suspended: true });
});
