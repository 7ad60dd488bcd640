import { beforeAll, describe, expect, test } from "bun:test";
import { MCP, outcome, UPSTREAM_URL, useCatalog } from "../../../test/support/stores/catalog.ts";

const { send, create } = useCatalog();

describe("the list of agents", () => {
  const names = async (query: string) => {
    const { status, body } = await send("GET", `/v1/agents?${query}`, undefined, "lister");
    expect(status).toBe(200);
    return body.data.map((agent: { name: string }) => agent.name);
  };

  beforeAll(async () => {
    const agents = [
      { name: "first", upstream_url: UPSTREAM_URL, tags: ["red", ","], description: "100% Straße_ΟΔΟΣ" },
      { name: "second", upstream_url: UPSTREAM_URL, tags: ["x,", ",y", "Red"], ...MCP },
      { name: "third", tags: ['a"red"b', "re"], description: "a\\b" },
      { name: "gone", upstream_url: UPSTREAM_URL, tags: ["red"] },
      { name: "Éclair İ", tags: [] },
    ];
    for (const agent of agents) {
      const { body } = await create(agent, "lister");
      if (agent.name === "gone") await send("DELETE", `/v1/agents/${body.id}`, undefined, "lister");
    }
  });

  test("is newest first, without the inactive ones, with the total", async () => {
    const { body } = await send("GET", "/v1/agents", undefined, "lister");
    expect(body).toMatchObject({ total: 4, limit: 20, offset: 0 });
    expect(body.data[0]).toEqual((await send("GET", `/v1/agents/${body.data[0].id}`, undefined, "lister")).body);
    expect(await names("")).toEqual(["Éclair İ", "third", "second", "first"]);
    expect((await send("GET", "/v1/agents", undefined, "nobody")).body).toEqual({
      data: [],
      total: 0,
      limit: 20,
      offset: 0,
    });
  });

  test("is cut into pages", async () => {
    expect(await names("limit=2&offset=1")).toEqual(["third", "second"]);
    expect(await names("offset=99999999999999999999")).toEqual([]);
    const { body } = await send("GET", "/v1/agents?limit=500&offset=-3", undefined, "lister");
    expect(body).toMatchObject({ total: 4, limit: 100, offset: 0 });
  });

  const filters: [string, string[]][] = [
    ["status=active", ["second", "first"]],
    ["status=pending", ["Éclair İ", "third"]],
    ["status=inactive", ["gone"]],
    ["protocol=mcp", ["second"]],
    ["tag=red", ["first"]],
    ["tag=Red", ["second"]],
    ["tag=re", ["third"]],
    ["tag=%2C", ["first"]],
    ["tag=", []],
    ["q=IRS", ["first"]],
    ["q=%25", ["first"]],
    ["q=_", ["first"]],
    ["q=100%25+strasse_οδος", ["first"]],
    ["q=a%5Cb", ["third"]],
    ["q=éCLAIR+i̇", ["Éclair İ"]],
    ["q=first100", []],
    ["q=first%01100", []],
    ["q=", ["Éclair İ", "third", "second", "first"]],
    ["q=r&status=active&protocol=http&tag=red", ["first"]],
  ];
  test.each(filters)("is filtered by %s", async (query, expected) => {
    expect(await names(query)).toEqual(expected);
  });

  test.each([
    ["status=gone", "status: must be one of pending, active, inactive"],
    ["protocol=", "protocol: must be one of http, mcp"],
    ["limit=x", "limit: must be an integer"],
    ["q=%00", "q: must not contain U+0000"],
    ["tag=%00", "tag: must not contain U+0000"],
    [`q=${"x".repeat(257)}`, "q: must be at most 256 characters"],
  ])("refuses %s", async (query, error) => {
    expect(outcome(await send("GET", `/v1/agents?${query}`))).toEqual([400, error]);
  });
});
