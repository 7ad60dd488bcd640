import { expect, test } from "bun:test";
import { createReadiness, healthRoutes } from "./health.ts";

const ask = (routes: ReturnType<typeof healthRoutes>) => routes.fetch(new Request("http://localhost/readyz"));

test("all who ask whether the gateway is ready share one probe of the database", async () => {
  let probes = 0;
  const probed = Promise.withResolvers<void>();
  const probe = () => {
    probes++;
    return probed.promise;
  };
  const keyring = { publicJwks: () => ({ keys: [] }), isComplete: () => true };
  const checkReady = createReadiness({ probe }, keyring);
  const routes = healthRoutes(checkReady, keyring);
  const asked = Array.from({ length: 500 }, () => ask(routes));
  probed.resolve();
  for (const answer of await Promise.all(asked)) expect(answer.status).toBe(200);
  expect((await ask(routes)).status).toBe(200);
  expect(probes).toBe(1);
});
